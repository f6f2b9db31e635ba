"""Runs, checkpoints and prepared text that lie in `tests/data/golden/` still load, resume and sample with equal results.

`tests/golden_runs.py` made them, and says what is in them. Another processor sums in another order, which changes last
bits: figures are compared to 1e-5 and weights to WEIGHTS. With ANDREA_EXACT=1 all of them must be bit-identical, on the kind
of processor and the version of torch that made the data.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import run_script, torchrun
from golden_runs import DATA, ROOT
from safetensors.torch import load_file
from torch import Tensor

from andrea.config import RunConfig, with_current_keys
from andrea.config.keys import dotted_keys

MADE = json.loads((DATA / "made.json").read_text(encoding="utf-8"))
RUNS = MADE["runs"]
EXACT = os.environ.get("ANDREA_EXACT") == "1"
FIGURES = 1e-5  # relative; absolute below 1
WEIGHTS = 5e-6  # absolute; of the largest of a tensor where that is above 1
TIMINGS = ("seconds", "tokens_per_second", "memory")  # parts of the names of what is not compared
# Settings that a command has for itself, and those that are settled anew for another number of ranks.
OF_THE_COMMAND = ("resume", "init_from", "dry_run", "name", "runs_dir", "data_dir")
OF_THE_RANKS = ("threads", "micro_batch", "parallel")

Call = Callable[..., str]


@pytest.fixture
def call(script, capsys: pytest.CaptureFixture) -> Call:
    """`call("train", "name=muon")` runs a command line in this process and returns what it printed; `andrea` is `-m andrea`."""

    def called(program: str, *words: str) -> str:
        if program == "andrea":
            from andrea.__main__ import main
        else:
            main = script(program)
        code, out, err = run_script(main, list(words), capsys)
        assert code == 0, out + err
        return out

    return called


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, as the runs were made in one: text, data, runs; all paths in them are relative."""
    for name, new in (("text", "text"), ("data", "data"), ("saved", "runs")):
        shutil.copytree(DATA / name, tmp_path / new)
    for file in (tmp_path / "text").iterdir():
        os.utime(file, ns=(MADE["text_mtime_ns"], MADE["text_mtime_ns"]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(name: str, step: int) -> Path:
    return Path("runs") / name / "checkpoints" / f"step-{step:08d}"


def middle_of(name: str) -> Path:
    return checkpoint(name, RUNS[name]["middle"])


def last_of(name: str) -> Path:
    return checkpoint(name, RUNS[name]["steps"])


def expected_of(name: str) -> dict[str, Any]:
    """The recorded end of a run; of `sharded` that of the one process which went on with it."""
    return RUNS[name].get("alone", RUNS[name])


def expected_weights(name: str) -> dict[str, Tensor]:
    if name == "muon":
        return load_file(DATA / "saved" / name / "checkpoints" / last_of(name).name / "model.safetensors")
    return load_file(DATA / "expected" / f"{name}.safetensors")


def sampled(call: Call, path: Path) -> str:
    """The text that sample.py writes."""
    return call("sample", f"checkpoint={path}", *MADE["sample_words"])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def resume(call: Call, name: str) -> str:
    """Go on from the middle checkpoint. `muon` has a later one, and goes back behind it."""
    return call("train", f"name={name}", f"resume={middle_of(name) if name == 'muon' else 'auto'}")


def assert_close(ours: Any, theirs: Any, where: str, exact: bool = EXACT) -> None:
    """Everything recorded is there, with the same numbers; new figures are ignored."""
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            if not any(word in key for word in TIMINGS):
                assert key in ours, f"{where}: no {key}"
                assert_close(ours[key], value, f"{where}, {key}", exact)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for our, their in zip(ours, theirs, strict=True):
            assert_close(our, their, where, exact)
    elif isinstance(theirs, float) and not exact:
        assert ours == pytest.approx(theirs, rel=FIGURES, abs=FIGURES, nan_ok=True), where
    else:
        assert ours == theirs, where


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = WEIGHTS) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        if EXACT and tolerance == WEIGHTS:
            assert torch.equal(ours[name], tensor), name
        else:
            most = tolerance * max(1.0, float(tensor.abs().max()))
            torch.testing.assert_close(
                ours[name], tensor, rtol=0, atol=most, msg=lambda text, name=name: f"{name}: {text}"
            )


def assert_same_records(name: str, exact: bool = EXACT) -> None:
    """What the resumed run has on record is what the uninterrupted one had: figures, samples, findings."""
    ours, theirs = Path("runs") / name, DATA / "saved" / name
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert_close(records(ours / file), records(theirs / file), f"{name}/{file}", exact)
    found = [
        [(line["step"], line["finding"], line["begins"]) for line in records(run / "health.jsonl")]
        for run in (ours, theirs)
    ]
    assert found[0] == found[1]


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_checkpoint_writes_its_text(name: str, place: Path, call: Call) -> None:
    assert sampled(call, middle_of(name)) == RUNS[name]["sample_of_middle"]


def test_a_golden_run_that_is_done_is_done(place: Path, call: Call) -> None:
    assert sampled(call, Path("runs") / "muon") == RUNS["muon"]["sample_of_last"]  # the newest checkpoint
    before = (last_of("muon") / "manifest.json").read_bytes()
    assert "already done" in call("train", "name=muon", "resume=auto")
    assert (last_of("muon") / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_run_gives_the_results_of_an_uninterrupted_one(name: str, place: Path, call: Call) -> None:
    """Figures, samples, findings, settings, weights and the text they write at the end."""
    of_one_rank = RUNS[name]["ranks"] == 1
    out = resume(call, name)
    assert f"step {RUNS[name]['middle']}, " in out and "  changed " not in out
    assert_same_records(name, exact=EXACT and of_one_rank)
    figures = [record for record in records(Path("runs") / name / "metrics.jsonl") if "val/bpb" in record][-1]
    assert_close({"step": RUNS[name]["steps"]} | figures, expected_of(name)["end"], f"{name}, end")
    assert_same_weights(load_file(last_of(name) / "model.safetensors"), expected_weights(name))
    assert sampled(call, last_of(name)) == expected_of(name)["sample_of_last"]
    left_out = OF_THE_COMMAND + (() if of_one_rank else OF_THE_RANKS)
    ours, theirs = (
        yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        for run in (Path("runs") / name, DATA / "saved" / name)
    )
    theirs = with_current_keys(RunConfig, theirs)  # a key that was removed since is not written again
    for settings in (theirs, theirs["train"]):
        for key in left_out:
            settings.pop(key, None)
    assert_close(ours, theirs, f"{name}/config.yaml", exact=True)


def test_a_golden_state_is_written_as_it_was(place: Path, call: Call) -> None:
    """Everything of the last checkpoint besides its weights, random state and memory of health among it."""
    resume(call, "muon")
    assert len(list(Path("runs/muon/checkpoints").glob("aside-step-00000008-*"))) == 1
    golden = DATA / "saved" / "muon" / "checkpoints" / last_of("muon").name
    ours, theirs = (json.loads((path / "state.json").read_text(encoding="utf-8")) for path in (last_of("muon"), golden))
    theirs["config"] = with_current_keys(RunConfig, theirs["config"])
    theirs["left_auto"] = [key for key in theirs["left_auto"] if key in dotted_keys(RunConfig)]  # not a removed one
    for key in ("resume", "name"):
        theirs["config"].pop(key)
    theirs.pop("working_folder")
    assert_close(ours, theirs, "state.json")
    ours, theirs = (load_file(path / "optimizer.safetensors") for path in (last_of("muon"), golden))
    assert_same_weights(ours, theirs)
    files = [set(json.loads((path / "manifest.json").read_text())["files"]) for path in (last_of("muon"), golden)]
    assert files[0] == files[1]


# ------------------------------------------------------------------------------------------------------ many ranks


def test_a_golden_sharded_checkpoint_is_consolidated(place: Path, call: Call) -> None:
    path = middle_of("sharded")
    assert (path / "shards").is_dir() and not (path / "model.safetensors").exists()
    call("andrea", "consolidate", f"checkpoint={path}")
    assert not (path / "shards").exists() and (path / "model.safetensors").exists()
    assert sampled(call, path) == RUNS["sharded"]["sample_of_middle"]
    resume(call, "sharded")
    assert_same_records("sharded", exact=False)
    assert_same_weights(load_file(last_of("sharded") / "model.safetensors"), expected_weights("sharded"))


@pytest.mark.slow
def test_two_ranks_go_on_from_a_golden_sharded_checkpoint(place: Path, call: Call) -> None:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = torchrun(2, ["name=sharded", "resume=auto"], cwd=place, env=os.environ | {"PYTHONPATH": paths})
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert_same_records("sharded")
    assert_same_weights(load_file(last_of("sharded") / "model.safetensors"), expected_weights("sharded"), 2 * WEIGHTS)
    assert sampled(call, last_of("sharded")) == RUNS["sharded"]["sample_of_last"]


# ---------------------------------------------------------------------------------------------------------- health


def test_a_finding_under_way_is_not_announced_again(place: Path, call: Call) -> None:
    state = json.loads((middle_of("health") / "state.json").read_text(encoding="utf-8"))
    assert state["health"]["active"] == {"many_epochs": 20}
    assert state["health"]["interval"]["clipped"] == 10  # in the middle of an interval of twenty steps
    out = resume(call, "health")
    announced = [line for line in out.splitlines() if line.startswith("health:")]
    assert len(announced) == 1 and announced[0].startswith("health: step 60: clipped_steps: ")
    state = json.loads((last_of("health") / "state.json").read_text(encoding="utf-8"))
    assert state["health"]["active"] == {"clipped_steps": 60, "many_epochs": 20}


# ------------------------------------------------------------------------------------------------- the prepared text


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "verified.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if "lock" not in path.name}


def test_text_prepared_anew_is_the_same_byte_for_byte(place: Path, call: Call) -> None:
    for tokenizer in (["tokenizer=byte"], ["tokenizer=bpe", "tokenizer.vocab_size=300"]):
        call("andrea", "prepare", "data_dir=anew", "data=text", "data.path=text", *tokenizer)
    anew, before = (
        sorted((Path(name).name, content) for name, content in contents(folder).items())
        for folder in (Path("anew"), DATA / "data")
    )
    assert anew == before  # without the folders' names, which hold the time of the text
