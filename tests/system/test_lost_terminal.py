"""A terminal, a reader or a log that is lost does not end a run. A hang-up saves the run, unless nohup ignores it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, ranks_of, tiny_command, tiny_words, torchrun, torchrun_command

from andrea.checkpoint import checkpoints_of, newest_whole
from andrea.training.records.run_folder import read_lines

ENDLESS = ["train.steps=100000", "train.log_every=1", "train.save_every=100000", "train.eval_every=100000"]


def in_bash(command: list[str], redirection: str) -> tuple[int, str]:
    """The exit code of a command whose streams are redirected, and what it wrote on the standard error of bash."""
    line = f"{shlex.join(command)} {redirection}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [
        ("| head -1", "Broken pipe"),
        pytest.param("2>&1 | true", "Broken pipe", marks=pytest.mark.slow),
        pytest.param(">&-", "it was closed at the start", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("<&- >&- 2>&-", "it was closed at the start", marks=pytest.mark.slow),
        pytest.param("> /dev/full 2>&1", "No space left on device", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_output_that_cannot_be_written_does_not_end_a_run(
    redirection: str, reason: str, tmp_path: Path, notes: Path
) -> None:
    assert in_bash(tiny_command(tmp_path, notes, "name=a"), redirection) == (0, "")
    run = tmp_path / "runs" / "a"
    assert read_lines(run / "metrics.jsonl")[-1]["event"] == "done" and newest_whole(run).step == 12
    assert (run / "run.log").read_text().count(f"standard output cannot be written ({reason})") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "failed_streams"),
    [
        ("> /dev/full 2>&1", 1),
        pytest.param("2>&1 | head -1", 1, marks=pytest.mark.long),
        pytest.param("<&- >&- 2>&-", 2, marks=pytest.mark.long),
    ],
)
def test_output_that_cannot_be_written_does_not_end_two_ranks(
    redirection: str, failed_streams: int, tmp_path: Path, notes: Path
) -> None:
    """Not even torchrun, which writes to the same streams."""
    words = tiny_words(tmp_path, notes, "name=a", "parallel=fsdp")
    assert in_bash(torchrun_command(2, words), redirection) == (0, "")
    run = tmp_path / "runs" / "a"
    assert read_lines(run / "metrics.jsonl")[-1]["event"] == "done" and newest_whole(run).step == 12
    assert (run / "run.log").read_text().count("cannot be written") == failed_streams


def test_preparing_goes_on_without_a_reader(tmp_path: Path, notes: Path) -> None:
    words = ["data=text", f"data.path={notes}", f"data_dir={tmp_path / 'data'}", "tokenizer=byte"]
    command = [sys.executable, "-m", "andrea", "prepare", *words]
    assert in_bash(["env", f"PYTHONPATH={ROOT}", *command], "| true") == (0, "")
    assert list((tmp_path / "data").glob("text-byte-*/meta.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("| head -c 1", 0, ""),
        (
            "> /dev/full",
            2,
            "error: standard output cannot be written (No space left on device); send it to another file",
        ),
    ],
)
def test_sampling_ends_without_a_reader(redirection: str, code: int, message: str, trained: Path) -> None:
    words = [f"checkpoint={trained}", "prompt=a", "max_new_tokens=1000000", "device=cpu", "threads=1"]
    ended, error = in_bash([sys.executable, str(ROOT / "sample.py"), *words], redirection)
    assert (ended, error.rpartition("\n\n")[2].strip()) == (code, message)


def until_it_trains(process: subprocess.Popen) -> None:
    assert any(line.startswith("step") for line in process.stdout)


def test_a_hang_up_saves_and_exits_129(tmp_path: Path, notes: Path) -> None:
    command = tiny_command(tmp_path, notes, "name=a", *ENDLESS)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until_it_trains(process)
    process.send_signal(signal.SIGHUP)
    assert "resume=auto" in process.stdout.read() and process.wait() == 129
    run = tmp_path / "runs" / "a"
    assert newest_whole(run).step == read_lines(run / "metrics.jsonl")[-1]["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torchrun", "rank 1"])
def test_a_hang_up_of_two_ranks_saves_once_and_ends_all(target: str, tmp_path: Path, notes: Path) -> None:
    """Also with restarts left: torchrun must not start the run again."""
    process = torchrun(2, tiny_words(tmp_path, notes, "name=a", "parallel=fsdp", *ENDLESS), restarts=3)
    until_it_trains(process)
    os.kill(process.pid if target == "torchrun" else ranks_of(process)[1], signal.SIGHUP)
    out = process.communicate(timeout=200)[0]
    last = newest_whole(tmp_path / "runs" / "a").step
    assert process.returncode == 1 and out.count(f"interrupted at step {last} ") == out.count("interrupted at") == 1, (
        out
    )
    assert read_lines(tmp_path / "runs" / "a" / "metrics.jsonl")[-1]["step"] == last > 0


@pytest.mark.slow
def test_a_hang_up_is_ignored_under_nohup(tmp_path: Path, notes: Path) -> None:
    command = ["nohup", *tiny_command(tmp_path, notes, "name=a", *ENDLESS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    until_it_trains(process)
    process.send_signal(signal.SIGHUP)
    for _ in range(5):  # further lines: it still trains
        assert process.stdout.readline().startswith("step")
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait() == 143


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_the_run(tmp_path: Path, notes: Path) -> None:
    """The system then sends SIGHUP, and every write to the terminal fails."""
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        tiny_command(tmp_path, notes, "name=a", *ENDLESS),
        start_new_session=True,
        preexec_fn=lambda: os.login_tty(os.dup(terminal)),
    )
    os.close(terminal)
    shown = b""
    while b"tokens/s" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert process.wait() == 129
    run = tmp_path / "runs" / "a"
    assert len(checkpoints_of(run)) == 1 and read_lines(run / "metrics.jsonl")[-1]["event"] == "interrupted"
    assert "standard output cannot be written (Input/output error)" in (run / "run.log").read_text()
