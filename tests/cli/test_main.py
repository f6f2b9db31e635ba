"""`andrea COMMAND`: the table of commands, and the scripts of a clone that call it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from andrea.__main__ import COMMANDS, main
from andrea.checkpoint import checkpoints_of
from andrea.config import UserError
from andrea.text.load_tokenizer import load_tokenizer


def test_commands_are_listed_and_misspelt_ones_refused(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0 and main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    with pytest.raises(UserError, match="did you mean prepare"):
        main(["prepar"])


def test_a_wrong_command_line_ends_before_torch_is_loaded() -> None:
    program = (
        "import sys; sys.modules['torch'] = None  # an import now fails\n"
        "from andrea.__main__ import start; sys.argv[1:] = ['train', 'train.setps=3']; start()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "error: unknown key train.setps; did you mean train.steps?\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f" {name} [key=value …]\n" in shown or f" {name}.py [key=value …]\n" in shown
    assert "\nFor example: " in shown and "\nKeys with their defaults:\n" in shown


@pytest.mark.parametrize("name", ["train", "sample"])
def test_the_scripts_of_a_clone_are_the_commands(name: str, script, capsys: pytest.CaptureFixture) -> None:
    assert main([name, "-h"]) == 0
    shown = capsys.readouterr().out
    assert script(name)(["-h"]) == 0
    assert capsys.readouterr().out == shown


def test_prepare_writes_shards(notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["prepare", "data=text", f"data.path={notes}", "tokenizer=byte", f"data_dir={tmp_path}"]) == 0
    assert "training tokens" in capsys.readouterr().out and list(tmp_path.rglob("*.bin"))


def test_prepare_does_not_prepare_the_default_text_for_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume=auto: prepare starts from data="):
        main(["prepare", "name=one", "resume=auto", f"data_dir={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_the_vocabulary_that_prepare_names_serves_another_text(notes: Path, tmp_path: Path, capsys) -> None:
    data = ["prepare", "data=text", f"data_dir={tmp_path / 'data'}"]
    assert main([*data, f"data.path={notes}", "tokenizer.vocab_size=300"]) == 0
    named = re.search("set (tokenizer.path=.*)", capsys.readouterr().out)
    assert named
    (tmp_path / "other.txt").write_text("quite another text\n" * 200)
    assert main([*data, f"data.path={tmp_path / 'other.txt'}", *named[1].split()]) == 0
    first, second = (load_tokenizer(path) for path in (tmp_path / "data").iterdir() if path.is_dir())
    assert first.identity == second.identity


def test_prepare_for_init_from_uses_the_tokenizer_of_that_run(trained: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "other.txt").write_text("quite another text\n" * 200)
    data = ["data=text", f"data.path={tmp_path / 'other.txt'}", f"data_dir={tmp_path / 'data'}"]
    assert main(["prepare", f"init_from={trained}", *data]) == 0
    (folder,) = (path for path in (tmp_path / "data").iterdir() if path.is_dir())
    assert load_tokenizer(folder).identity == load_tokenizer(checkpoints_of(trained)[-1]).identity
