"""A run is resumed in the folder of its own run, or in a new folder; no other folder is ever written to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.config import UserError
from andrea.training.records.recognise import is_free, is_run_folder, mark, run_folder_of, run_id_of

OLD_RUNS = Path(__file__).resolve().parents[2] / "data" / "of_4252b8f" / "saved"


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
    mark_of(copy).unlink()  # recognised as folders of older versions are
    assert run_folder_of(read_checkpoint(copy / "checkpoints" / last)) == copy


@pytest.mark.parametrize("name", sorted(path.name for path in OLD_RUNS.iterdir()))
def test_run_folders_of_older_versions_are_recognised(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    shutil.copytree(OLD_RUNS / name, run)
    assert is_run_folder(run) and run_id_of(run) is None
    for path in checkpoints_of(run):
        assert run_folder_of(read_checkpoint(path)) == run


@pytest.mark.parametrize("file", ["config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content", [None, b"", b"a: 1\n", b"\xff\n", b'{"step": 1, "tokens": 3}\n', b"[" * 5000 + b"\n"]
)
def test_a_folder_that_does_not_agree_is_not_recognised(file: str, content: bytes | None, tmp_path: Path) -> None:
    run = tmp_path / "muon"
    shutil.copytree(OLD_RUNS / "muon", run)
    (run / file).unlink()
    if content is not None:
        (run / file).write_bytes(content)
    found = run_folder_of(read_checkpoint(checkpoints_of(run)[-1]))
    assert found == (run if (file, content) == ("metrics.jsonl", b"") else None)  # saved before the first record


def test_a_run_of_another_seed_or_model_is_not_recognised(tmp_path: Path) -> None:
    run = tmp_path / "muon"
    shutil.copytree(OLD_RUNS / "muon", run)
    whole = (run / "config.yaml").read_text()
    for old, new in (("seed: 1337", "seed: 1"), ("d_mlp: 16", "d_mlp: 32"), ("per_step: 128", "per_step: 64")):
        (run / "config.yaml").write_text(whole.replace(old, new))
        assert (run / "config.yaml").read_text() != whole
        assert run_folder_of(read_checkpoint(checkpoints_of(run)[-1])) is None


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
