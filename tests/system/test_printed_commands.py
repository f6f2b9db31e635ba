"""Each command that a run prints does what it says when it is typed in the folder in which the run was started."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import run_script, tiny_words

from andrea.checkpoint import checkpoints_of
from andrea.runtime.files import StorageFailed
from andrea.training.step import Batch, TrainingStep
from andrea.training.trainer import RunCheckpoints

PLACES = ["runs_dir=else where", "data_dir=cache"]


@pytest.fixture
def words(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a tiny run whose places are relative to the working folder and are not the default ones."""
    place = tmp_path / "my place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "1000")  # a narrow terminal gets each command on a line of its own
    return tiny_words(place, notes, *PLACES, "name=k 9", "train.sample_tokens=0")


def interrupted(words: list[str], script, capsys, monkeypatch) -> str:
    """What a run prints that is interrupted at its sixth step."""
    batch = TrainingStep.batch

    def with_ctrl_c(self: TrainingStep, step: int) -> Batch:
        if step == 5:
            signal.raise_signal(signal.SIGINT)
        return batch(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "batch", with_ctrl_c)
        code, out, err = run_script(script("train"), words, capsys)
    assert code == 130, out + err
    return out


def shown(out: str, before: str) -> str:
    return re.search(f"{before}(.*)$", out, re.MULTILINE)[1]


def test_the_command_of_an_interrupted_run_continues_it_and_the_next_one_samples(
    words, script, capsys, monkeypatch
) -> None:
    command = shown(interrupted(words, script, capsys, monkeypatch), "^continue with: ")
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "resuming else where/k 9/checkpoints/step-00000006: step 6" in ended.stdout
    assert {path.name for path in Path.cwd().iterdir()} == {"else where", "cache"}
    sample = shlex.split(shown(ended.stdout, "^next: .* sample "))
    assert run_script(script("sample"), [*sample, "max_new_tokens=2", "device=cpu", "compile=off"], capsys)[0] == 0


@pytest.mark.parametrize("mishap", ["the disk is full", "not finite"])
def test_an_error_names_the_words_that_continue_the_run(mishap: str, words, script, capsys, monkeypatch) -> None:
    def failing(self: RunCheckpoints) -> None:
        if self.progress.step == 8:
            raise StorageFailed("no space")
        save(self)

    save = RunCheckpoints.save
    with monkeypatch.context() as patch:
        if mishap == "not finite":
            patch.setattr(RunCheckpoints, "is_finite", lambda self: self.progress.step < 8)
        else:
            patch.setattr(RunCheckpoints, "save", failing)
        code, out, err = run_script(script("train"), words, capsys)
    assert code == (3 if mishap == "not finite" else 5), out + err
    again = shlex.split(shown(out + err, "continue with .* train ").partition(", set ")[0])
    assert again == ["name=k 9", "resume=auto", *PLACES]
    assert run_script(script("train"), [*again, "train.steps=9"], capsys)[0] == 0
    assert checkpoints_of(Path("else where") / "k 9")[-1].name == "step-00000009"
