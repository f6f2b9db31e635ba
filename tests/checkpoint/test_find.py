"""The newest checkpoint of a run, the newest run, and what a user names; and which checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_checkpoints import write

from andrea.checkpoint import best_of, checkpoints_of, locate, newest_run, newest_whole, read_checkpoint
from andrea.checkpoint.keep import keep_newest, mark_best, set_aside_after
from andrea.config import UserError
from andrea.runtime.files import remove_unfinished, replace_text
from andrea.text.load_tokenizer import from_path, load_gpt2
from andrea.text.shards import find_shards
from andrea.text.sources import Source


def test_the_newest_whole_checkpoint_is_found_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    run, reported = tmp_path / "runs" / "a", []
    for step in (5, 9, 10):
        write(run, step)
    (run / "checkpoints" / "step-00000010" / "state.json").unlink()
    (run / "checkpoints" / ".writing-step-00000011-1").mkdir()
    assert newest_whole(run, reported.append).step == 9 and "step-00000010" in reported[0]
    assert [path.name for path in checkpoints_of(run)] == ["step-00000005", "step-00000009", "step-00000010"]
    remove_unfinished(run / "checkpoints")
    assert not list((run / "checkpoints").glob(".*"))
    for requested in (None, "a", str(run), str(run / "checkpoints" / "step-00000009")):
        assert locate(requested, tmp_path / "runs", report=reported.append).step == 9
    assert newest_run(tmp_path / "runs") == run


def test_a_run_and_its_best_checkpoint_are_named_in_many_ways(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "runs" / "a"
    for step in (5, 9):
        write(run, step)
    mark_best(run, "step-00000005")
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {
        "a": 9, str(run): 9, str(run / "checkpoints"): 9, "a/checkpoints": 9, "~/runs/a": 9,
        str(run / "checkpoints" / "best"): 5, "a/checkpoints/best": 5, "a/checkpoints/step-00000005": 5,
    }  # fmt: skip
    for requested, step in named.items():
        assert locate(requested, tmp_path / "runs").step == step, requested
    monkeypatch.chdir(run / "checkpoints")
    assert locate("best", tmp_path / "runs").step == 5
    for content in (b"", b"\xff\xfe", b"../../etc", b"x" * 5000):
        (run / "checkpoints" / "best").write_bytes(content)
        with pytest.raises(UserError, match="neither a folder nor a run"):
            locate("a/checkpoints/best", tmp_path / "runs")
        assert best_of(run) is None


def test_a_missing_checkpoint_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint under"):
        locate(None, tmp_path)
    write(tmp_path / "first", 1)
    with pytest.raises(UserError, match="did you mean first"):
        locate("frist", tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        locate("empty", tmp_path)


@contextmanager
def shut(folder: Path) -> Iterator[None]:
    """`folder` without permissions; root, whom permissions do not stop, becomes another user meanwhile."""
    rights, user = folder.stat().st_mode, os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(rights)


def test_folders_without_permission_are_passed_over_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "theirs", 1)
    with shut(tmp_path / "theirs"):
        assert checkpoints_of(tmp_path / "theirs") == []
        for refused in (
            lambda: locate(str(tmp_path / "theirs" / "checkpoints"), tmp_path),
            lambda: locate("theirs", tmp_path),
            lambda: read_checkpoint(tmp_path / "theirs"),
            lambda: find_shards("a", tmp_path / "theirs" / "a.bin", "data.path"),
            lambda: Source("a", "text", tmp_path / "theirs" / "a.txt"),
            lambda: from_path(tmp_path / "theirs", "bpe"),
            lambda: load_gpt2(str(tmp_path / "theirs" / "a")),
            lambda: load_gpt2(str(tmp_path / "theirs")),
        ):
            with pytest.raises(UserError):
                refused()


# ---------------------------------------------------------------------------------------------- which are kept


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    mark_best(tmp_path, "step-00000002")
    keep_newest(tmp_path, 2)
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["2", "4", "5"]
    assert best_of(tmp_path) == "step-00000002"
    replace_text(tmp_path / "checkpoints" / "best", "../../etc")
    assert best_of(tmp_path) is None


def test_checkpoints_after_the_step_gone_back_to_are_set_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, step)
    mark_best(run, "step-00000003")
    aside = set_aside_after(run, 1)
    assert [path.name for path in checkpoints_of(run)] == ["step-00000001"] and best_of(run) is None
    assert len(aside) == 2 and all(read_checkpoint(path).step > 1 for path in aside)  # whole, under another name
    assert newest_whole(run).step == 1


def test_checkpoints_of_one_step_are_set_aside_twice_within_a_second(tmp_path: Path) -> None:
    run, aside = tmp_path / "run", []
    for _ in range(3):
        write(run, 1)
        write(run, 2)
        aside += set_aside_after(run, 1)
    assert len(set(aside)) == 3 and all(read_checkpoint(path).step == 2 for path in aside)


def test_a_best_checkpoint_before_the_step_gone_back_to_stays_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    mark_best(tmp_path, "step-00000001")
    set_aside_after(tmp_path, 2)
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["1", "2"]
    assert best_of(tmp_path) == "step-00000001"


def test_a_run_stands_for_its_best_checkpoint_once_validation_has_become_worse(tmp_path: Path) -> None:
    run, reported = tmp_path / "runs" / "a", []
    write(run, 5, compared_bpb=2.0, best_bpb=2.0)
    write(run, 9, compared_bpb=2.0, best_bpb=2.0)  # interrupted: not evaluated, and the last evaluation was the best
    mark_best(run, "step-00000005")
    assert locate("a", tmp_path / "runs", report=reported.append).step == 9 and not reported
    write(run, 10, compared_bpb=2.5, best_bpb=2.0)
    assert locate("a", tmp_path / "runs", report=reported.append).step == 5
    assert "step 5 had the best evaluation" in reported[0] and "step-00000010" in reported[0]
    assert locate("a", tmp_path / "runs", newest=True).step == 10
    (run / "checkpoints" / "step-00000005" / "state.json").unlink()
    assert locate("a", tmp_path / "runs", report=reported.append).step == 10 and "step-00000005" in reported[-1]


def test_checkpoints_of_older_versions_are_compared_by_their_only_figure(tmp_path: Path) -> None:
    run = tmp_path / "a"
    write(run, 5)
    write(run, 9, val_bpb=2.5, best_bpb=2.0)
    assert locate("a", tmp_path).step == 9  # no file `best`
    mark_best(run, "step-00000005")
    assert locate("a", tmp_path).step == 5
