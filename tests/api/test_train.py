"""`andrea.train`: the command's run, in a process that is afterwards as it was before."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest
import torch
from conftest import tiny_words

import andrea

SHORT = ["train.steps=4", "train.sample_tokens=0", "precision=fp32", "device=cpu"]


def figures_of(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record[key] for record in records for key in ("train/loss", "val/bpb") if key in record]


def test_it_is_the_run_of_the_command(tmp_path: Path, notes: Path, script) -> None:
    words = tiny_words(tmp_path, notes, *SHORT)
    run = andrea.train(*words, "name=called")
    assert script("train")([*words, "name=typed"]) == 0 == run.exit_code
    assert figures_of(run.folder) == figures_of(tmp_path / "runs" / "typed") != []
    assert run.folder == tmp_path / "runs" / "called" and run.figures["step"] == 4
    assert run.figures["val/bpb"] == figures_of(run.folder)[-1]
    assert run.load(device="cpu").checkpoint.step == 4
    assert andrea.train(*words, "name=called", "resume=auto") == run  # it is done already


def settings() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("gradients", [True, False])
def test_the_process_is_as_it_was_before(tmp_path: Path, notes: Path, gradients: bool) -> None:
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.set_grad_enabled(gradients):
        before = settings()
        assert andrea.train(*tiny_words(tmp_path, notes, *SHORT)).exit_code == 0
        assert settings() == before
        with pytest.raises(andrea.UserError):
            andrea.train(*tiny_words(tmp_path, notes, *SHORT, "device=cuda:99"))
        assert settings() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_memory_is_read_before_it_is_written(
    tmp_path: Path, notes: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch fills new tensors with NaN, which a run switches off, the figures are the same."""
    words = tiny_words(tmp_path, notes, *SHORT, f"precision={precision}", "model.d_model=32", "model.n_head=2")
    plain = andrea.train(*words, "name=plain")
    torch.utils.deterministic.fill_uninitialized_memory = True
    monkeypatch.setattr(torch._C, "_set_deterministic_fill_uninitialized_memory", lambda on: None)
    filled = andrea.train(*words, "name=filled")
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert figures_of(filled.folder) == figures_of(plain.folder) != []


def test_it_trains_outside_the_main_thread(tmp_path: Path, notes: Path) -> None:
    runs = []
    words = tiny_words(tmp_path, notes, *SHORT)
    thread = threading.Thread(target=lambda: runs.append(andrea.train(*words)))
    thread.start()
    thread.join()
    assert runs[0].exit_code == 0


def test_what_is_wrong_is_a_user_error(tmp_path: Path) -> None:
    for words, message in (
        (["train.stepz=3"], "did you mean train.steps"),
        (["-m", "seed=1,2"], "-m is not supported here; call train in a loop"),
        (["model=andrea-nana"], "did you mean andrea-nano"),
    ):
        with pytest.raises(andrea.UserError, match=message):
            andrea.train(*words, f"runs_dir={tmp_path}")


def test_a_dry_run_has_no_model(tmp_path: Path, notes: Path) -> None:
    run = andrea.train(*tiny_words(tmp_path, notes), "dry_run=true")
    assert run == andrea.TrainedRun(None, 0, {})
    with pytest.raises(andrea.UserError, match="dry_run=true trained no model"):
        run.load()
