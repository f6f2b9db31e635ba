"""The newest checkpoint of a run, the newest run, and what a user names; and which checkpoints are kept."""

from __future__ import annotations

import itertools
import math
import os
import resource
from pathlib import Path

import pytest
from conftest import shut
from small_checkpoints import write

from andrea.checkpoint import best_of, checkpoints_of, is_best_so_far, locate, newest_run, newest_whole, read_checkpoint
from andrea.checkpoint.find_and_prune import mark_and_prune, set_aside_after
from andrea.config import UserError
from andrea.runtime.files import StorageFailed, remove_unfinished
from andrea.text.load_tokenizer import from_path, load_gpt2
from andrea.text.shards import find_shards
from andrea.text.sources import Source


def judged(step: int, figure: float, best: float) -> dict[str, float]:
    """The fields of state.json of a run whose last evaluation, after `step`, gave `figure` bits per byte."""
    return {"compared_bpb": figure, "evaluated_step": step, "best_bpb": best}


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
    write(run, 5, **judged(5, 2.0, best=2.0))
    write(run, 9, **judged(5, 2.0, best=2.0))  # interrupted: not evaluated, and the last evaluation was the best
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {
        "a": 9, str(run): 9, str(run / "checkpoints"): 9, "a/checkpoints": 9, "~/runs/a": 9,
        str(run / "checkpoints" / "best"): 5, "a/checkpoints/best": 5, "a/checkpoints/step-00000005": 5,
    }  # fmt: skip
    for requested, step in named.items():
        assert locate(requested, tmp_path / "runs").step == step, requested
    monkeypatch.chdir(run / "checkpoints")
    assert locate("best", tmp_path / "runs").step == 5
    for content in (b"", b"\xff\xfe", b"../../etc", b"step-00000009"):  # the file is for people alone
        (run / "checkpoints" / "best").write_bytes(content)
        assert locate("a/checkpoints/best", tmp_path / "runs").step == 5
    with pytest.raises(UserError, match="neither a folder nor a run"):
        locate("/best", tmp_path / "runs")


def test_a_run_is_found_by_its_name_beside_another_folder_of_this_name(tmp_path: Path, monkeypatch) -> None:
    """A run is often called as its text. A run or checkpoint in the folder of the name comes before one under runs_dir."""
    write(tmp_path / "runs" / "letters", 4)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("Dear friend")
    monkeypatch.chdir(tmp_path)
    for newest in (False, True):
        assert locate("letters", Path("runs"), newest=newest).step == 4
    write(tmp_path / "letters", 9)
    assert locate("letters", Path("runs")).step == 9
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="other is not a complete checkpoint"):
        locate("other", Path("runs"))


def test_a_missing_checkpoint_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint under"):
        locate(None, tmp_path)
    write(tmp_path / "first", 1)
    with pytest.raises(UserError, match="did you mean first"):
        locate("frist", tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        locate("empty", tmp_path)


def test_folders_without_permission_are_passed_over_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "theirs", 1)
    with shut(tmp_path / "theirs"):
        assert newest_run(tmp_path) is None
        for unread in (lambda: checkpoints_of(tmp_path / "theirs"), lambda: locate("theirs", tmp_path)):
            with pytest.raises(StorageFailed, match="theirs/checkpoints cannot be read: Permission denied"):
                unread()  # as a run without checkpoints it would be begun anew
        for refused in (
            lambda: locate(str(tmp_path / "theirs" / "checkpoints"), tmp_path),
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
    """Whatever the file `best` says, which a crash may leave old, and which may not be readable."""
    for step, figure in enumerate((4.0, 2.5, 3.0, 2.5, math.nan), 1):
        write(tmp_path, step, **judged(step, figure, best=1.0))
    note = tmp_path / "checkpoints" / "best"
    note.write_text("step-00000001\n")
    assert mark_and_prune(tmp_path, 2) == 2.5  # of equal figures the older, as the run counts only lower ones as better
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["2", "4", "5"]
    assert best_of(tmp_path) == note.read_text().strip() == "step-00000002"


def test_without_an_evaluation_the_oldest_is_marked_and_has_no_figure(tmp_path: Path) -> None:
    assert mark_and_prune(tmp_path, 2) is None
    write(tmp_path, 1)
    write(tmp_path, 2, **judged(1, 2.0, best=2.0))
    assert mark_and_prune(tmp_path, 2) is None and best_of(tmp_path) == "step-00000001"


def test_a_checkpoint_that_cannot_be_read_is_not_removed_because_it_may_be_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, **judged(step, float(step), best=1.0))
    state = tmp_path / "checkpoints" / "step-00000001" / "state.json"
    state.rename(tmp_path / "elsewhere")
    assert mark_and_prune(tmp_path, 1) == 2.0
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["1", "2", "4"]
    assert mark_and_prune(tmp_path, 1, remembered=1.0) == 2.0  # what is lost is not the best any more
    state.mkdir()
    note = tmp_path / "checkpoints" / "best"
    for content in (b"\xff\xfe", b"x" * 5000, b"\0"):  # a damaged note
        note.write_bytes(content)
        assert mark_and_prune(tmp_path, 1, remembered=1.0) == 1.0  # what cannot be read may be readable the next time
        assert note.read_text() == "step-00000002\n"
    state.rmdir()
    (tmp_path / "elsewhere").rename(state)
    assert mark_and_prune(tmp_path, 1) == 1.0  # readable again
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["1", "4"]


def test_an_unreadable_checkpoint_is_skipped_by_name_with_the_reason(tmp_path: Path) -> None:
    """Whichever of its files cannot be read: the run goes on from an older one."""
    older, newest = write(tmp_path, 1), write(tmp_path, 2)
    for path in (*older.iterdir(), *newest.iterdir()):
        path.chmod(0o644)  # for the user that `shut` becomes
    for path in (newest, *newest.iterdir()):
        reported: list[str] = []
        with shut(path):
            assert newest_whole(tmp_path, reported.append).step == 1
        assert len(reported) == 1 and "step-00000002" in reported[0], path
    assert "Permission denied" in reported[0] and newest_whole(tmp_path).step == 2


def test_a_result_that_cannot_be_read_now_is_not_replaced_by_another_model(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    best, newest = write(run, 1, **judged(1, 1.0, best=1.0)), write(run, 2, **judged(2, 2.0, best=1.0))
    for path in (best, *best.iterdir(), newest, *newest.iterdir()):
        path.chmod(0o755)
    for path in (best / "model.safetensors", best / "state.json", best):  # the second and the third hold its figure
        with shut(path), pytest.raises(StorageFailed, match="Permission denied"):
            locate(str(run), tmp_path / "runs")
    assert locate(str(run), tmp_path / "runs").step == 1


def test_nor_is_an_unreadable_newest_one_that_is_the_best(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    older, newest = write(run, 1, **judged(1, 2.0, best=2.0)), write(run, 2, **judged(2, 1.0, best=1.0))
    for path in (older, *older.iterdir(), newest, *newest.iterdir()):
        path.chmod(0o755)
    for path, named in itertools.product((newest / "state.json", newest), (run, run / "checkpoints" / "best")):
        with shut(path), pytest.raises(StorageFailed, match="Permission denied"):
            locate(str(named), tmp_path / "runs")
    assert locate(str(run / "checkpoints" / "best"), tmp_path / "runs").step == 2


def test_a_process_that_may_open_no_more_files_does_not_blame_the_checkpoint(tmp_path: Path) -> None:
    """With one file after another: first none can be opened, in the end the checkpoint is read."""
    write(tmp_path, 1)
    path, soft_hard = write(tmp_path, 2), resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = set()
    for spare in range(10):
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, soft_hard[1]))
        try:
            assert newest_whole(tmp_path).open_tensors().read("w").sum() == 27  # of step 2: none was skipped
        except StorageFailed as failed:
            raised.add(str(failed))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
    assert len(raised) > 1 and all(text.endswith("cannot be read: Too many open files") for text in raised)
    assert path.exists()


def test_checkpoints_after_the_step_gone_back_to_are_set_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, step, **judged(step, 4.0 - step, best=4.0 - step))
    assert best_of(run) == "step-00000003"
    aside = set_aside_after(run, 1)
    assert [path.name for path in checkpoints_of(run)] == ["step-00000001"] == [best_of(run)]
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
        write(tmp_path, step, **judged(step, float(step), best=1.0))
    set_aside_after(tmp_path, 2)
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["1", "2"]
    assert best_of(tmp_path) == "step-00000001"


@pytest.mark.parametrize("best", [2.0, -9.0, 0.0])
def test_the_best_figure_is_the_best_and_a_little_more_is_within_the_slack(best: float) -> None:
    """Below zero is 1 - reward, for a reward above 1."""
    more = 0.005 * abs(best)
    assert is_best_so_far({"compared_bpb": best, "best_bpb": best}, 0.01)
    assert is_best_so_far({"compared_bpb": best + more, "best_bpb": best}, 0.01)
    assert not is_best_so_far({"compared_bpb": best + 3 * more + 1e-9, "best_bpb": best}, 0.01)


def test_a_run_stands_for_its_best_checkpoint_once_validation_has_become_worse(tmp_path: Path) -> None:
    run, reported = tmp_path / "runs" / "a", []
    write(run, 5, **judged(5, 2.0, best=2.0))
    write(run, 9, **judged(5, 2.0, best=2.0))  # interrupted: not evaluated, and the last evaluation was the best
    assert locate("a", tmp_path / "runs", report=reported.append).step == 9 and not reported
    write(run, 10, **judged(10, 2.5, best=2.0))
    assert locate("a", tmp_path / "runs", report=reported.append).step == 5
    assert "step 5 had the best evaluation" in reported[0] and "step-00000010" in reported[0]
    assert locate("a", tmp_path / "runs", newest=True).step == 10
    (run / "checkpoints" / "step-00000005" / "state.json").unlink()
    assert locate("a", tmp_path / "runs", report=reported.append).step == 10 and "step-00000005" in reported[-1]
