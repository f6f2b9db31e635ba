"""`andrea runs` with disk, delete and rename: only runs that nobody uses are touched, and a renamed run is the same run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from compare.run_folders import make_run

from andrea.__main__ import main
from andrea.checkpoint import best_of, newest_run, newest_whole
from andrea.config import UserError
from andrea.insight.compare.runs import find_run_folders
from andrea.runtime.files import exclusive_lock
from andrea.training.records.run_folder import read_lines


def runs(capsys: pytest.CaptureFixture, runs_dir: Path, *words: str) -> str:
    assert main(["runs", *words, f"runs_dir={runs_dir}", f"data_dir={runs_dir.parent / 'data'}"]) == 0
    return capsys.readouterr().out


def test_a_run_is_deleted_only_when_confirmed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    with pytest.raises(UserError, match=r"a \([\d.]+ kB, 1 checkpoint\) was not deleted") as refused:
        runs(capsys, tmp_path, "delete", "a")
    assert run.exists()
    typed = str(refused.value).split("andrea runs ")[-1].split()  # what the message says to type
    assert main(["runs", *typed]) == 0 and "deleted: " in capsys.readouterr().out
    assert not run.exists() and other.exists() and os.listdir(tmp_path) == ["b"]


def test_a_run_that_is_half_deleted_is_no_run(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kept", "doomed"):  # the second is the newest
        make_run(tmp_path / name)

    def interrupted(folder: Path) -> None:
        (folder / "run.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs(capsys, tmp_path, "delete", "doomed", "confirm=true")
    assert newest_run(tmp_path) == tmp_path / "kept" and find_run_folders([str(tmp_path)]) == [tmp_path / "kept"]


@pytest.mark.parametrize("words", [["delete", "NAME", "confirm=true"], ["rename", "NAME", "new"]], ids=lambda w: w[0])
@pytest.mark.parametrize("what", ["missing", "of another program", "a link", "in use", "a teacher"])
def test_what_is_no_unused_run_is_neither_deleted_nor_renamed(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = make_run(tmp_path / "real")
    name = {"missing": "reel", "of another program": "photos", "a link": "link"}.get(what, "real")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    (tmp_path / "link").symlink_to(run)
    if what == "a teacher":
        make_run(tmp_path / "pupil", train__teachers=[str(run / "checkpoints" / "step-00000100")])
    words = [name if word == "NAME" else word for word in words]
    said = {"in use": "is in use by another process", "a teacher": "is a teacher .* of pupil"}.get(
        what, "is not the folder of a run"
    )
    before = sorted(tmp_path.rglob("*"))
    if what == "in use":
        with exclusive_lock(run / ".lock"), pytest.raises(UserError, match=said):
            runs(capsys, tmp_path, *words)
    else:
        with pytest.raises(UserError, match=said + (".*did you mean real" if what == "missing" else "")):
            runs(capsys, tmp_path, *words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("to", ["b", "wandb", "sweeps", ".writing-x"])
def test_a_name_that_is_taken_is_refused(to: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    with pytest.raises(UserError, match="choose another name"):
        runs(capsys, tmp_path, "rename", "a", to)
    assert {"a", "b"} == set(os.listdir(tmp_path))


def test_a_renamed_run_is_resumed_and_its_parents_and_children_stay(
    tiny_run, tmp_path: Path, notes: Path, script, capsys
) -> None:
    folder = tmp_path / "runs"
    quiet = ["train.sample_tokens=0", f"runs_dir={folder}"]
    assert tiny_run("name=first", "train.steps=4", *quiet) == 0
    assert tiny_run("name=second", "train.steps=4", "init_from=first", *quiet) == 0
    best = best_of(folder / "first")
    out = runs(capsys, folder, "rename", "first", "earlier")
    assert "is now" in out and not (folder / "first").exists()
    assert best_of(folder / "earlier") == best and newest_whole(folder / "earlier").step == 4
    assert yaml.safe_load((folder / "earlier" / "config.yaml").read_text())["name"] == "earlier"
    for name in ("earlier", "second"):
        assert tiny_run(f"resume={name}", "train.steps=8", f"runs_dir={folder}") == 0
        assert read_lines(folder / name / "metrics.jsonl")[-1]["event"] == "done"
    assert {path.name for path in folder.iterdir()} == {"earlier", "second"}
    capsys.readouterr()
    rows = [re.split("  +", line) for line in runs(capsys, folder).splitlines()]
    assert {row[0]: row[7] for row in rows[1:3]} == {"earlier": "–", "second": "earlier"}


def test_a_configuration_that_cannot_be_read_is_not_replaced_by_the_new_name(tmp_path: Path, capsys) -> None:
    config = make_run(tmp_path / "a") / "config.yaml"
    config.write_text(config.read_text() + "train: [")
    before = config.read_bytes()
    runs(capsys, tmp_path, "rename", "a", "b")
    assert (tmp_path / "b" / "config.yaml").read_bytes() == before


def test_disk_shows_each_run_and_each_prepared_text_the_largest_first(tmp_path: Path, capsys) -> None:
    place = tmp_path / "runs"
    make_run(place / "small", 1000)
    make_run(place / "large", 100_000)
    (place / "wandb").mkdir()
    (tmp_path / "data" / "text-bpe").mkdir(parents=True)
    (tmp_path / "data" / "text-bpe" / "train.bin").write_bytes(bytes(1500))
    lines = [re.split("  +", line.strip()) for line in runs(capsys, place, "disk").splitlines()]
    assert [Path(line[1]).name for line in lines[:4]] == ["large", "small", "wandb", "text-bpe"]
    assert lines[0][2] == "1 checkpoint" and lines[3][0] == "1.5 kB" and lines[4][1].startswith("in all")


@pytest.mark.parametrize("words", [["delete"], ["rename", "a"], ["rename", "a", "to=b"], ["rename=a"]])
def test_missing_names_are_one_line_with_the_form_to_type(words: list[str], tmp_path: Path, capsys) -> None:
    make_run(tmp_path / "a")
    with pytest.raises(UserError, match=r"needs .*runs (delete NAME confirm=true|rename (NAME|a) NEW)"):
        runs(capsys, tmp_path, *words)
