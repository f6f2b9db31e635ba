"""Training writes the page of its run into the run folder, and the page of a compared single run is the same."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compare.run_folders import make_run

from andrea.checkpoint.tensors import write_shard
from andrea.insight.compare.page import RunPage
from andrea.insight.compare.runs import LeftOut, read_run

RECORD = {"step": 100, "tokens": 1, "flops": 1.0, "seconds": 1.0}


def data_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_the_page_is_written_at_evaluations_and_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    logger, page = RunPage(folder), folder / "run.html"
    logger.record({**RECORD, "train/loss": 1.0})
    assert not page.exists()
    logger.record({**RECORD, "val/loss": 1.0})
    assert data_of(page)["title"] == "Run one" and data_of(page)["samples"] == []
    sample = {"step": 100, "prompt": "a", "text": "</script>"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    logger.sample(RECORD | sample)
    assert data_of(page)["samples"] == [sample]
    logger.alert(RECORD)
    (folder / "lens").mkdir()
    # Two of steps that were evaluated, one of a step that the run has not reached, a user's own.
    for name in ("step-00000100", "step-00000075", "step-00000110", "mine"):
        (folder / "lens" / f"{name}.html").touch()
    logger.page(RECORD)
    assert data_of(page)["lenses"] == ["lens/step-00000075.html", "lens/step-00000100.html"]
    page.unlink()
    logger.finish(0)
    assert data_of(page)["lenses"] == ["lens/step-00000075.html", "lens/step-00000100.html"]


def test_there_is_no_page_before_the_first_checkpoint(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", saved=False)
    RunPage(folder).record({**RECORD, "val/loss": 1.0})
    assert not (folder / "run.html").exists()


def test_a_sharded_run_has_its_page_before_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", parameters=1000)
    (checkpoint,) = (folder / "checkpoints").iterdir()
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "shards").mkdir()
    weights = {"w": torch.zeros(199, 5), "v": torch.zeros(5)}
    for rank in (0, 1):  # each rank keeps some rows of the weights and of the optimizer's state
        rows = {name: tensor.tensor_split(2)[rank] for name, tensor in weights.items()}
        first_rows = {name: rank * len(tensor.tensor_split(2)[0]) for name, tensor in weights.items()}
        rows |= {f"{name}/momentum": tensor for name, tensor in rows.items()}
        first_rows |= {f"{name}/momentum": first for name, first in first_rows.items()}
        write_shard(checkpoint / "shards", rank, rows, first_rows)
    RunPage(folder).record({**RECORD, "val/loss": 1.0})
    assert data_of(folder / "run.html")["title"] == "Run one"
    assert read_run(folder, "one").parameters == 1000
    for path in (checkpoint / "shards").iterdir():
        path.unlink()
    with pytest.raises(LeftOut, match="model.safetensors is missing"):
        read_run(folder, "one")


def test_training_writes_the_page(trained: Path) -> None:
    data = data_of(trained / "run.html")
    assert data["title"] == "Run first" and data["summary"].endswith("finished")
    assert ["train.steps", "8"] in data["settings"]
    assert [point["step"] for point in data["runs"][0]["validation"]] == [4, 8]
    assert data["measured_heads"][-1]["step"] == 8


def test_a_folder_of_lens_pages_that_cannot_be_read_is_an_error_and_no_page_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.glob` would find nothing there, and the page would lose its links in silence."""
    folder = make_run(tmp_path / "one")
    (folder / "lens").mkdir()
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, functools.partial(refuse_lens, getattr(os, name)))
    with pytest.raises(PermissionError):
        RunPage(folder).draw()


def refuse_lens(call: Callable, path: str | Path) -> object:
    if Path(path).name == "lens":
        raise PermissionError(13, "denied")
    return call(path)
