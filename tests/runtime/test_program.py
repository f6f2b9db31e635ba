"""The command that messages show, and new processes of this package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from andrea.runtime.program import module_command, module_environment, typed_command


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
