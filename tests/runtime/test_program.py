"""The command that messages show, and new processes of this package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from andrea.runtime.program import module_command, module_environment, typed_command, typed_words


@pytest.mark.parametrize(
    ("started", "train", "lens"),
    [
        ("train.py", "python train.py", "python -m andrea lens"),
        ("/clone/sample.py", "python train.py", "python -m andrea lens"),
        ("/env/bin/andrea", "andrea train", "andrea lens"),
        ("/clone/andrea/__main__.py", "python -m andrea train", "python -m andrea lens"),
        ("/env/pytest/__main__.py", "python train.py", "python -m andrea lens"),
    ],
)
def test_a_command_is_shown_as_this_process_was_started(started, train, lens, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert (typed_command("train"), typed_command("lens")) == (train, lens)


def test_under_torchrun_the_launcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for started, expected in (
        ("train.py", "torchrun … train.py"),
        ("andrea/__main__.py", "torchrun … -m andrea train"),
    ):
        monkeypatch.setattr(sys, "argv", [started])
        assert typed_command("train", "torchrun …") == expected


def test_a_new_process_finds_this_package_from_any_folder(tmp_path) -> None:
    command = module_command("andrea", ["--help"])
    shown = subprocess.run(command, env=module_environment(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("python -m andrea COMMAND")


def test_a_new_process_runs_no_module_of_the_working_directory(tmp_path) -> None:
    """As the console script `andrea` does not either."""
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('a module of the working directory ran')")
    command = module_command("andrea", ["--help"])
    ended = subprocess.run(command, env=module_environment(), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr


def test_a_command_to_copy_holds_no_commands_of_a_name() -> None:
    assert typed_words(name="a-1.b", resume="auto") == "name=a-1.b resume=auto"
    assert typed_words(name="a;rm x", checkpoint="$(x)") == "'name=a;rm x' 'checkpoint=$(x)'"
