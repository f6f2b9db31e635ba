"""`andrea runs`: every run folder is a row, whatever state it is in."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from compare.run_folders import make_run

from andrea.__main__ import main
from andrea.config import UserError
from andrea.runtime.files import exclusive_lock, is_locked
from andrea.training.records.run_folder import mark


def table(capsys: pytest.CaptureFixture, *words: str) -> list[list[str]]:
    assert main(["runs", *words]) == 0
    return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]


def test_every_run_is_a_row_with_its_figures_and_state(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for age, (name, keys) in enumerate(
        {"whole": {}, "broken": {"step": 60}, "young": {"step": 5, "saved": False}}.items()
    ):
        metrics = make_run(tmp_path / name, 2000, **keys) / "metrics.jsonl"
        os.utime(metrics, (1e9 - 1e5 * age,) * 2)
    record = {"step": 5, "tokens": 1, "flops": 1.0, "seconds": 1.0, "event": "interrupted"}
    with open(tmp_path / "young" / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps(record) + "\n")
    os.utime(tmp_path / "young" / "metrics.jsonl", (1e9 - 1e6,) * 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "wandb").mkdir()
    heads, *rows, left_out, _ = table(capsys, str(tmp_path))
    assert heads == ["run", "model", "params", "step", "bits/byte", "state", "text", "parent", "last record"]
    assert [row[:8] for row in rows] == [
        ["whole", "andrea-nano", "2.00k", "100/100", rows[0][4], "done", "pystdlib", "–"],
        ["broken", "andrea-nano", "2.00k", "60/100", rows[1][4], "crashed", "pystdlib", "–"],
        ["young", "andrea-nano", "–", "5/100", "–", "interrupted", "pystdlib", "–"],
    ]
    last = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert rows[0][4] == f"{last['val/bpb']:.4f}" and all(
        re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", row[8]) for row in rows
    )
    assert left_out == ["left out, because they are not runs: notes"]


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_no_line_is_wider_than_the_terminal_and_a_name_is_whole(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = make_run(tmp_path / "andrea-nano-pystdlib-20261122-122957").name
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert any(line.split("  ")[0] == name for line in lines) and any("pystdlib" in line for line in lines)


def test_text_and_parents_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "first", data__kind="text", data__path="/home/me/notes/")
    source = str(tmp_path / "first" / "checkpoints" / "step-00000100")
    second = make_run(tmp_path / "second", data__kind="mixture", data__sources={"code": {}, "notes": {}})
    config = yaml.safe_load((second / "config.yaml").read_text())
    config["train"]["teachers"] = [str(tmp_path / "other" / "checkpoints" / "step-00000001")]
    (second / "run.json").unlink()
    mark(second, None, source)
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    third = make_run(tmp_path / "third")
    (third / "run.json").unlink()
    mark(third, None, resume=Path(source))
    rows = {row[0]: row[6:8] for row in table(capsys, str(tmp_path))}
    assert rows["first"] == ["notes", "–"] and rows["second"] == ["code+notes", "first, other"]
    assert rows["third"] == ["pystdlib", "first"]


def test_a_run_in_progress_is_called_running(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lock = make_run(tmp_path / "one") / ".lock"
    assert not is_locked(lock)
    with exclusive_lock(lock):
        assert is_locked(lock) and table(capsys, f"runs_dir={tmp_path}")[1][5] == "running"
    lock.write_text("left by a killed process")
    assert table(capsys, f"runs_dir={tmp_path}")[1][5] == "done"


def test_damaged_run_folders_are_rows_as_well(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = make_run(tmp_path / "one")
    (folder / "metrics.jsonl").write_text('{"step": "x", "val/bpb": "y"}\n[1]\n{"step"')
    next(folder.glob("checkpoints/*/model.safetensors")).write_bytes(b"\xff" * 20)
    assert table(capsys, str(tmp_path))[1][:6] == ["one", "andrea-nano", "–", "0/100", "–", "crashed"]


@pytest.mark.parametrize(("made", "message"), [(False, "is not a folder"), (True, "holds no run")])
def test_a_folder_without_runs_is_named(tmp_path: Path, made: bool, message: str) -> None:
    if made:
        (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=f"runs_dir=.*{message}; train .* with `.*train"):
        main(["runs", str(tmp_path / "runs")])
