"""The command that messages show, and new processes of this package."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from andrea.runtime import program
from andrea.runtime.program import (
    module_command,
    module_environment,
    torchrun_command,
    typed_command,
    typed_words,
)


@pytest.mark.parametrize(
    ("started", "train", "lens"),
    [
        ("python -u train.py", "python train.py", "python -m andrea lens"),
        ("python3 /clone/sample.py", "python3 /clone/train.py", "python3 -m andrea lens"),
        ("/env/bin/python /env/bin/andrea", "/env/bin/andrea train", "/env/bin/andrea lens"),
        ("python -m andrea", "python -m andrea train", "python -m andrea lens"),
        ("python -m pytest", "python -m andrea train", "python -m andrea lens"),
    ],
)
def test_a_command_is_shown_as_this_process_was_started(started, train, lens, monkeypatch) -> None:
    monkeypatch.setattr(program, "STARTED", started.split())
    assert (typed_command("train"), typed_command("lens")) == (train, lens)


def test_torchrun_is_shown_with_its_machines_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun_command() == ""
    ranks = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"TORCHELASTIC_MAX_RESTARTS": "3"}).items():
        monkeypatch.setenv(name, value)
    expected = "torchrun --standalone --nproc-per-node=2 --max-restarts=3"
    assert torchrun_command() == expected
    for started, typed in ((["python", "-u", "train.py"], "train.py"), (["python", "-m", "andrea"], "-m andrea train")):
        monkeypatch.setattr(program, "STARTED", started)
        assert typed_command("train", torchrun_command()) == f"{expected} {typed}"


@pytest.mark.parametrize("form", ["clone/train.py", "link to a clone", "module", "console script"])
def test_a_command_that_is_shown_starts_the_same_program_from_the_same_folder(form: str, tmp_path: Path) -> None:
    """Each command is run in a shell, as it is shown; --help shows the command itself."""
    (tmp_path / "a clone").symlink_to(ROOT)
    script = Path(sys.executable).with_name("andrea")
    if form == "console script" and not script.exists():
        pytest.skip("the package is not installed")
    started = {
        "clone/train.py": [sys.executable, os.path.relpath(ROOT / "train.py", tmp_path)],
        "link to a clone": [sys.executable, "a clone/train.py"],
        "module": [sys.executable, "-m", "andrea", "train"],
        "console script": [str(script), "train"],
    }[form]
    of_module = {"PYTHONPATH": str(ROOT)} if form in ("module", "console script") else {"PYTHONPATH": ""}
    options = {"env": os.environ | of_module, "cwd": tmp_path, "capture_output": True, "text": True}
    first = subprocess.run([*started, "--help"], **options)
    shown = first.stdout.partition(" [key=value")[0]
    assert first.returncode == 0 and shown, first.stderr
    again = subprocess.run(f"{shown} --help", shell=True, **options)
    assert again.stdout == first.stdout, again.stderr


def test_a_clone_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:1])
    monkeypatch.setattr(program, "STARTED", [sys.executable, str(ROOT / "train.py")])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shown = typed_command("lens")
    assert shown.startswith(f"PYTHONPATH={shlex.quote(str(ROOT))} ")
    ended = subprocess.run(f"{shown} --help", shell=True, capture_output=True, text=True)
    assert f"{sys.executable} -m andrea lens [key=value" in ended.stdout, ended.stderr


def test_a_new_process_finds_this_package_from_any_folder(tmp_path) -> None:
    command = module_command("andrea", ["--help"])
    shown = subprocess.run(command, env=module_environment(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert " -m andrea COMMAND" in shown.stdout.splitlines()[0]


def test_a_new_process_runs_no_module_of_the_working_directory(tmp_path) -> None:
    """As the console script `andrea` does not either."""
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('a module of the working directory ran')")
    command = module_command("andrea", ["--help"])
    ended = subprocess.run(command, env=module_environment(), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr


def test_a_command_to_copy_holds_no_commands_of_a_name() -> None:
    assert typed_words(name="a-1.b", resume="auto") == "name=a-1.b resume=auto"
    assert typed_words(name="a;rm x", checkpoint="$(x)") == "'name=a;rm x' 'checkpoint=$(x)'"
