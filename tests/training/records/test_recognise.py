"""A run is resumed in the folder of its own run, or in a new folder; no other folder is ever written to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.config import UserError
from andrea.training.records.run_folder import is_free, is_run_folder, mark, run_folder_of, run_id_of

GOLDEN_RUNS = Path(__file__).resolve().parents[2] / "data" / "golden" / "saved"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with files of a user, whose names are those in a run folder."""
    home = tmp_path / "home"
    (home / "Downloads").mkdir(parents=True)
    (home / "config.yaml").write_text("mine: 1\n")
    (home / "metrics.jsonl").write_text('{"mine": 1, "step": 99}\n')
    return home


@pytest.mark.parametrize("place", ["Downloads/step-00000004", "checkpoints/step-00000004", "Downloads/mine"])
def test_a_copied_checkpoint_resumes_in_a_new_folder(
    place: str, home: Path, trained: Path, tmp_path: Path, tiny_run: Callable[..., int], capsys
) -> None:
    source = next(path for path in checkpoints_of(trained) if path.name == "step-00000004")
    copy = home / place
    shutil.copytree(source, copy)
    before = contents(home)
    assert tiny_run(f"resume={copy}", "name=again", "train.steps=6", "train.save_every=2", "precision=fp32") == 0
    assert contents(home) == before
    again = tmp_path / "runs" / "again"
    assert [path.name[-1] for path in checkpoints_of(again)] == ["6"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"is not in the folder of this run, and stays as it is; the run continues in {again}" in said
    assert run_id_of(again) != run_id_of(trained)
    assert tiny_run(f"resume={again}", "train.steps=8", "precision=fp32") == 0  # from now on a run like any other
    assert [path.name[-1] for path in checkpoints_of(again)] == ["6", "8"]


def test_a_checkpoint_copied_into_another_run_does_not_cut_its_records(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    mark_of(other).write_text(json.dumps({"run": "0" * 16}))
    assert run_folder_of(read_checkpoint(checkpoints_of(other)[-1])) is None


def mark_of(run: Path) -> Path:
    return run / "run.json"


def test_a_copied_or_moved_run_folder_is_the_runs_folder(trained: Path, tmp_path: Path, monkeypatch) -> None:
    copy, link = tmp_path / "copy", tmp_path / "link"
    shutil.copytree(trained, copy)
    link.symlink_to(copy)
    last = checkpoints_of(copy)[-1].name
    assert run_folder_of(read_checkpoint(copy / "checkpoints" / last)) == copy
    assert run_folder_of(read_checkpoint(link / "checkpoints" / last)) == link
    monkeypatch.chdir(copy / "checkpoints" / last)
    assert run_folder_of(read_checkpoint(Path())) == copy.resolve()
    mark_of(copy).unlink()
    assert run_folder_of(read_checkpoint(copy / "checkpoints" / last)) is None


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN_RUNS.iterdir()))
def test_golden_run_folders_are_recognised(name: str) -> None:
    run = GOLDEN_RUNS / name
    assert is_run_folder(run)
    for path in checkpoints_of(run):
        assert run_folder_of(read_checkpoint(path)) == run


def test_a_mark_is_written_once_and_a_damaged_one_again(tmp_path: Path) -> None:
    first = mark(tmp_path, None)
    assert mark(tmp_path, "1" * 16) == first == run_id_of(tmp_path)
    for damage in (b"", b"[]", b'{"run": 3}', b'{"run": "../x"}', b"\xff", b"[" * 9000):
        mark_of(tmp_path).write_bytes(damage)
        assert run_id_of(tmp_path) is None
    assert mark(tmp_path, "1" * 16) == "1" * 16


def test_a_new_run_takes_no_folder_of_another_program(tiny_run, home: Path) -> None:
    before = contents(home)
    for words in ([], ["resume=auto"]):
        with pytest.raises(UserError, match="name=home: .* is not a run folder of this program"):
            tiny_run(f"runs_dir={home.parent}", "name=home", *words)
    assert contents(home) == before and not is_free(home)
