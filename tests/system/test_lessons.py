"""The lessons of docs/lessons/ run as they stand: their Python blocks, and their commands with runs made short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY

import andrea
from andrea.text.chat import ChatTokenizer
from andrea.text.tokenizer import ByteTokenizer

FOLDER = ROOT / "docs" / "lessons"
LESSONS = sorted(FOLDER.glob("[0-9]*.md"))
WITHOUT_RUNS = 3  # the first lessons train nothing
# Every run is short, and keeps what a lesson sets in its command. The last lesson needs a window for a conversation.
LENGTHS = {"train.steps", "train.max_minutes", "train.flops"}
SHORT = [
    word for word in TINY if not word.startswith(("tokenizer=", "logger=", "model.sequence_length=", "train.steps="))
]
SHORT += ["tokenizer.vocab_size=512", "model.sequence_length=128"]


def parts(page: Path) -> list[tuple[str, str]]:
    """The Python blocks and the commands of the page, in order: ("python" or "command", text)."""
    found = []
    for text in re.split(r"^(```python\n.*?^```)$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        if text.startswith("```python"):
            found.append(("python", text.removeprefix("```python\n").removesuffix("```")))
        else:
            found += [("command", command) for command in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]
    return found


def run_python(page: Path, names: dict) -> None:
    for number, (_, block) in enumerate(part for part in parts(page) if part[0] == "python"):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), names)


def test_there_are_ten_lessons_and_the_index_names_each() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert [page.name[:2] for page in LESSONS] == [f"{number:02}" for number in range(1, 11)]
    for number, page in enumerate(LESSONS, 1):
        text = page.read_text(encoding="utf-8")
        assert f"]({page.name})" in index and text.startswith(f"# {number}. ")
        assert re.search(r"^\*\*\d+ minutes\.?\*\*", text, re.MULTILINE)
        assert (
            "## The idea" in text and "## Try" in text and re.search("^## Your (picture|figure)$", text, re.MULTILINE)
        )


@pytest.mark.parametrize("page", LESSONS[:WITHOUT_RUNS], ids=lambda page: page.stem)
def test_the_lessons_without_a_run(page: Path, capsys: pytest.CaptureFixture) -> None:
    run_python(page, {})
    out = capsys.readouterr().out
    assert {"01": "13.7", "02": "[False, False, False, True]", "03": "True"}[page.name[:2]] in out


def test_the_questions_of_the_last_lesson_are_asked(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """The test of all lessons, which trains the model that answers, is long and seldom runs."""
    answering = SimpleNamespace(tokenizer=ChatTokenizer(ByteTokenizer()), generate=lambda ids, **_: str(len(ids)))
    monkeypatch.setattr(andrea, "load", lambda name: answering)
    run_python(LESSONS[-1], {})
    assert "0 of 10 facts and 0 of 10 sums are right" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_the_lessons_with_runs_in_one_empty_folder(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for page in LESSONS[WITHOUT_RUNS:]:
        code = ""
        for kind, text in parts(page):
            if kind == "python":  # as the index says: one after the other in one file
                code += text + "\n"
                (tmp_path / "lesson.py").write_text(code, encoding="utf-8")
                command = shlex.join([sys.executable, "lesson.py"])
            else:
                command = shortened(text)
            done = subprocess.run(
                command,
                shell=True,
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (page.name, command, done.stdout[-2000:], done.stderr[-2000:])
    for name in ("born", "functions", "luck", "sizes", "lens"):
        assert (tmp_path / f"{name}.html").is_file()


def shortened(command: str) -> str:
    """The command of a lesson; of a training run, with the settings of SHORT that the lesson does not set itself."""
    if "-m andrea train" not in command:
        return command
    typed = {word.split("=")[0] for word in shlex.split(command)}
    tuned = {"model", "tokenizer"} if "init_from" in typed else set()  # come with the weights
    added = [word for word in SHORT if word.split("=")[0] not in typed and word.split(".")[0] not in tuned]
    words = [word for word in shlex.split(command) if word.split("=")[0] not in LENGTHS]
    return shlex.join([*words, *added, "train.steps=4", "train.max_minutes=null"])
