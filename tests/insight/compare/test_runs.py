"""Reading finished, unfinished and damaged run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from run_folders import CONFIG, loss_of, make_run

from andrea.__main__ import main
from andrea.config import UserError
from andrea.insight.compare.runs import LeftOut, find_run_folders, read_run, read_runs
from andrea.text.tokenizer import ByteTokenizer


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one", parameters=1234, tokens=20_000), "one")
    assert (run.parameters, run.tokens, run.step, run.finished) == (1234, 20_000, 100, True)
    assert run.loss == pytest.approx(loss_of(1234, 20_000)) and run.bpb == pytest.approx(run.loss / 2)
    assert [point["step"] for point in run.validation] == [
        25,
        50,
        75,
        100,
    ]  # the closing event does not count as an evaluation
    assert run.tokens_per_second == 1000 + (50 + 55) / 2  # of 5, 10, … 100, the median
    assert (run.mfu, run.peak_memory_bytes, run.fingerprint) == (None, None, "aa" * 32)
    assert run.tokenizer == ByteTokenizer().identity


def test_an_unfinished_run_with_a_torn_line_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "cut", step=70)
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 75, "tok')
    run = read_run(folder, "cut")
    assert not run.finished
    assert run.progress == "at step 70 of 100, last evaluated at step 50"


def test_the_end_of_an_interrupted_run_is_no_evaluation(tmp_path: Path) -> None:
    """Its record repeats the figures of the last evaluation, here of step 50."""
    folder = make_run(tmp_path / "cut", step=70)
    *_, record = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    event = {key: record[key] for key in ("step", "tokens", "flops", "seconds")} | {"event": "interrupted"}
    before = read_run(folder, "cut")
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps(event | {"val/loss": before.loss, "val/bpb": before.bpb}) + "\n")
    run = read_run(folder, "cut")
    assert run.validation == before.validation and run.result["step"] == 50
    assert run.progress == "at step 70 of 100, last evaluated at step 50"


def test_the_result_is_the_best_evaluation_of_a_checkpoint_on_the_disk(tmp_path: Path, capsys) -> None:
    """Whatever train.save_every is now: an earlier part of the run may have had another."""
    folder = make_run(tmp_path / "one", train__save_every=100)
    figures = {25: 0.5, 50: 0.75, 75: 0.75, 100: 1.0}  # after step 25, no checkpoint was written
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [each | {"val/bpb": figures[each["step"]]} if "val/bpb" in each else each for each in records]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (50, 75):
        shutil.copytree(folder / "checkpoints" / "step-00000100", folder / "checkpoints" / f"step-{step:08d}")
    run = read_run(folder, "one")
    assert (run.result["step"], run.bpb) == (50, 0.75)
    assert main(["runs", str(tmp_path)]) == 0 and "0.7500" in capsys.readouterr().out


def test_folders_that_cannot_be_compared_are_left_out_with_a_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "early", step=20)
    make_run(tmp_path / "fine")
    make_run(tmp_path / "unsaved", saved=False)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text("a: [")
    (tmp_path / "wandb").mkdir()
    found, left_out = read_runs(find_run_folders([str(tmp_path)]))
    assert [run.name for run in found] == ["fine"]
    reasons = {line.split(":")[0]: line for line in left_out}
    assert set(reasons) == {"early", "unsaved", "fresh", "odd"}
    assert "no evaluation yet, at step 20" in reasons["early"]
    assert "no checkpoint yet" in reasons["unsaved"] and "no record yet" in reasons["fresh"]
    assert "config.yaml" in reasons["odd"]


def test_a_damaged_checkpoint_is_a_reason_to_leave_a_run_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    next((folder / "checkpoints").glob("step-*/model.safetensors")).write_bytes(b"\x08")
    with pytest.raises(LeftOut, match="step-00000100 cannot be read"):
        read_run(folder, "one")


def test_runs_of_equal_names_get_their_parent_folders_and_each_run_is_read_once(tmp_path: Path) -> None:
    for parent in ("a", "b", "c/b"):
        make_run(tmp_path / parent / "same")
    folders = [str(tmp_path / name) for name in ("a", "b", "b/same", "c/b")]
    found, _ = read_runs(find_run_folders(folders))
    assert [run.name for run in found] == ["a/same", "c/b/same", f"{tmp_path.name}/b/same"]


def test_paths_that_hold_no_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a folder nor a run"):
        find_run_folders([str(tmp_path / "none")])
    with pytest.raises(UserError, match="holds no run"):
        find_run_folders([str(tmp_path)])


def test_a_glob_may_name_the_folders_that_training_makes_beside_the_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    (tmp_path / "sweeps" / "mine").mkdir(parents=True)
    assert find_run_folders([str(run), str(tmp_path / "sweeps")]) == [run]
    with pytest.raises(UserError, match="holds no run"):
        find_run_folders([str(tmp_path / "sweeps")])


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "kept" / "one")
    (tmp_path / "one").mkdir()  # such as the folder of its text
    monkeypatch.chdir(tmp_path)
    assert find_run_folders(["one"], str(tmp_path / "kept")) == [folder]
    with pytest.raises(UserError, match="onne is neither a folder nor a run under runs_dir=.*did you mean one"):
        find_run_folders(["onne"], str(tmp_path / "kept"))
    with pytest.raises(UserError, match="neither a folder nor a run"):
        find_run_folders(["two"], str(tmp_path / "absent"))


def test_heads_and_samples_are_read_and_damaged_ones_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    axes = {"step": 7, "tokens": 70, "flops": 1.0, "seconds": 1.0}
    good = {
        **axes,
        "attention/heads/x": [[1.0, None]],
        "attention/heads/y": [[1.0], [2.0, 3.0]],
        "attention/heads/z": 3,
    }
    with open(folder / "metrics.jsonl", "a") as stream:
        for record in (good, {"step": 8, "attention/heads/x": [[2.0]]}, {**axes, "attention/heads/x": ["<b>"]}):
            stream.write(json.dumps(record | {"flops": 1.0, "seconds": 1.0}) + "\n")
    (folder / "samples.jsonl").write_text('{"step": 7, "prompt": "p", "text": "t"}\n[1]\n{"step": 8, "prompt": 3}\n')
    run = read_run(folder, "one")
    assert run.heads == [{**axes, "tables": {"x": [[1.0, None]]}}]
    assert run.samples == [{"step": 7, "prompt": "p", "text": "t"}]
