"""Standard output and standard error that leave out what they cannot write."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea.runtime.streams import (
    at_words,
    drawable,
    new_failures,
    printable,
    raise_output_failure,
    unfailing,
    unfailing_output,
)


def file_on(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", encoding="latin-1", errors="strict", closefd=False)


def test_text_arrives_as_from_the_original_stream() -> None:
    read_end, write_end = os.pipe()
    original = file_on(write_end)
    stream = unfailing(original)
    assert (stream.encoding, stream.errors, stream.isatty()) == ("latin-1", "strict", False)
    stream.write("é\n")
    stream.flush()
    assert os.read(read_end, 9) == b"\xe9\n"


ATTACK = "\x1b]0;title\x07\x1b[2J\x9b2J\roverwritten"


def test_a_terminal_gets_no_control_characters_of_a_text() -> None:
    shown, terminal = pty.openpty()
    stream = unfailing(open(terminal, "w", encoding="utf-8", closefd=False))
    print(f"a\tb {ATTACK}\r\n", end="", file=stream, flush=True)
    assert os.read(shown, 999).decode().replace("\r", "") == ("a\tb \\x1b]0;title\\x07\\x1b[2J\\x9b2J\\roverwritten\n")
    drawable(stream).write("\x1b[2K")  # what a progress line needs
    stream.flush()
    assert os.read(shown, 999) == b"\x1b[2K"


def test_a_file_gets_every_character() -> None:
    read_end, write_end = os.pipe()
    stream = unfailing(open(write_end, "w", encoding="utf-8", closefd=False))
    stream.write(ATTACK)
    stream.flush()
    assert os.read(read_end, 999).decode() == ATTACK and drawable(stream) is None


def test_a_name_on_one_line_holds_no_character_that_hides_another() -> None:
    assert printable("é\n\x1b\u202e\udcff") == r"é\n\x1b\u202e\udcff"


def test_a_lost_reader_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setattr(sys, "stdout", file_on(write_end))
    os.close(read_end)
    with unfailing_output():
        assert not new_failures()
        raise_output_failure()
        for _ in range(3):
            print("x" * 99999, flush=True)
        assert new_failures() == ["standard output cannot be written (Broken pipe); its text is lost"]
        assert not new_failures()
        with pytest.raises(BrokenPipeError):
            raise_output_failure()


@pytest.mark.parametrize("buffering", [-1, 0], ids=["buffered", "unbuffered"])
def test_a_full_non_blocking_pipe_is_waited_for(buffering: int) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    reader = subprocess.Popen(["bash", "-c", "sleep 0.5; wc -c"], stdin=read_end, stdout=subprocess.PIPE)
    binary = open(write_end, "wb", buffering, closefd=False)
    stream = unfailing(io.TextIOWrapper(binary, write_through=not buffering))
    stream.write("x" * 1_000_000)
    stream.flush()
    os.close(write_end)
    assert reader.communicate()[0].strip() == b"1000000"


def test_a_stream_that_is_no_file_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stdout", captured)
    with unfailing_output():
        assert sys.stdout is captured and not new_failures()
        raise_output_failure()


def test_closed_descriptors_are_not_given_to_other_files() -> None:
    program = (
        "import os\n"
        "from andrea.runtime.streams import unfailing_output\n"
        "with unfailing_output():\n"
        "    print('lost'); assert os.open('/dev/null', os.O_RDONLY) > 2\n"
        "os._exit(7)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *command]).returncode == 7


@pytest.mark.parametrize("option", ["-u", "-B"])
def test_python_s_option_for_unbuffered_output_is_kept(option: str) -> None:
    program = (
        "import os\n"
        "from andrea.runtime.streams import unfailing_output\n"
        "with unfailing_output():\n"
        "    print('seen', end=''); os._exit(0)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, option, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.stdout == ("seen" if option == "-u" else "")


@given(st.lists(st.text("ab·│é", min_size=1, max_size=30), min_size=1), st.sampled_from([20, 60, 80]))
def test_lines_are_broken_between_words_only(words: list[str], width: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        lines = at_words(" ".join(words)).split("\n")
    assert [word for line in lines for word in line.split()] == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)


def test_a_command_is_not_broken_and_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "wandb: offline; to upload this run: `wandb login` once, then `wandb sync runs/wandb/offline-run-x` and so on"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    assert at_words(line) == line
    monkeypatch.setenv("COLUMNS", "50")
    assert at_words(line).split("\n") == [
        "wandb: offline; to upload this run: `wandb login`",
        "  once, then",
        "  `wandb sync runs/wandb/offline-run-x` and so on",
    ]
    assert at_words("next: python sample.py checkpoint=runs/one/checkpoints/step-00000700").count("\n") == 1
    assert at_words("  │ one two " + 46 * "x" + " three", "  │ ").split("\n") == [
        "  │ one two",
        "  │ " + 46 * "x",
        "  │ three",
    ]
