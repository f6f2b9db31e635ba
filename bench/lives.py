"""One life of bench/kill.py: a command, the moment and the manner of its end, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from common import ROOT

from andrea.checkpoint import checkpoints_of, read_checkpoint, step_name
from andrea.config import UserError
from andrea.runtime.files import is_locked
from andrea.training.parallel.ranks import StoreWatchdog, Watchdog
from andrea.training.records.run_folder import read_lines

sys.path.insert(0, str(ROOT / "tests"))

from forked_train import ForkedTrain

Process = Union[subprocess.Popen, ForkedTrain, "ForkedRanks"]  # what they share: pid, poll, returncode

TORCHRUN_GRACE_S = 30.0  # from SIGTERM to SIGKILL, for the other ranks when one has failed
GRACE_S = 120.0  # for what a command has started, after the command has ended
# How a command may end, by the manner of its end. A command that is done before its end exits with 0.
ENDINGS = {
    "SIGKILL": {-signal.SIGKILL},
    "SIGTERM": {-signal.SIGTERM, 143},
    "SIGHUP": {-signal.SIGHUP, 129},
    "closed output": set(),
    "full disk": {2, 5},
}
# What a life may wait for before its end: short parts of a command, in which few moments fall by chance. The end comes
# up to so many seconds later.
WAITS_S = {"text being prepared": 0.1, "a save": 0.01, "the last checkpoint": 0.2, "consolidation": 0.008}
WAIT_WEIGHTS = {None: 10, "text being prepared": 3, "a save": 4, "the last checkpoint": 3, "consolidation": 3}


@dataclass(frozen=True)
class Setting:
    """What all lives of one call share. words: of the command. disk: the folder of everything that it writes.

    later: what is typed in their place once the run has a checkpoint; empty: the same words.
    kinds: the manners of ending that are possible here. ranks: 1 for a command without torchrun. warm: whether commands are
    forks of this process; ranks then run without torchrun.
    """

    words: list[str]
    disk: Path
    kinds: list[str]
    ranks: int
    warm: bool
    later: tuple[str, ...] = ()

    @property
    def typed(self) -> list[str]:
        return list(self.later) if self.later and checkpoints_of(self.run) else self.words

    @property
    def run(self) -> Path:
        return self.disk / "runs" / "a"

    @property
    def last_checkpoint(self) -> Path:
        (steps,) = (int(word.partition("=")[2]) for word in self.words if word.startswith("train.steps="))
        return self.run / "checkpoints" / step_name(steps)

    @property
    def doing(self) -> Path:
        """What a fork is doing now, as it tells the watchdog."""
        return self.disk.with_name("doing")

    @property
    def errors(self) -> Path:
        """What the command writes to standard error, outside of the disk that gets full."""
        return self.disk.with_name("errors")


class Command:
    """train.py in a session of its own. has_reader: its output goes to a pipe, which `close_output` closes."""

    def __init__(self, setting: Setting, has_reader: bool) -> None:
        self.reader: int | None = None
        self.log, self.output = setting.disk / "log", b""
        self.most_busy_s, self.left_over = 0.0, 0
        self.mark = secrets.token_hex(8)
        cache = setting.disk / "cache"
        environment = {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
        environment |= {"TMPDIR": str(cache), "ANDREA_LIFE": self.mark}
        setting.doing.unlink(missing_ok=True)
        with open(setting.errors, "w") as errors, open(self.log, "w") as log:
            stdout: Any = log
            if has_reader:
                self.reader, stdout = os.pipe()
                os.set_blocking(self.reader, False)
            start = forked if setting.warm else started
            self.process = start(setting, stdout, errors, environment)
        if has_reader:
            os.close(stdout)

    def is_running(self) -> bool:
        if self.reader is not None:  # the pipe must not get full
            with contextlib.suppress(BlockingIOError):
                self.output += os.read(self.reader, 1 << 20)
        return self.process.poll() is None

    def said(self) -> str:
        """What the command has printed so far."""
        return (self.output or self.log.read_bytes()).decode(errors="replace")

    def busy_s(self) -> float:
        """Processor time of the command and of its ranks so far: unlike the clock, other programs do not change it."""
        ticks, main = 0, self.process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
            for pid in (main, *children):
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        self.most_busy_s = max(self.most_busy_s, ticks / os.sysconf("SC_CLK_TCK"))
        return self.most_busy_s

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition. Returns whether the command still runs."""
        while (running := self.is_running()) and not condition():
            time.sleep(0.003)
        return running

    def processes(self, having: str = "") -> list[int]:
        """The processes with the command's `mark` in their environment, and a line in it that begins with `having`."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                lines = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"ANDREA_LIFE={self.mark}" in lines and any(line.startswith(having) for line in lines):
                    found.append(int(path.name))
        return found

    def close_output(self) -> None:
        if self.reader is not None:
            os.close(self.reader)
            self.reader = None

    def ended(self) -> int:
        """The exit code, once all that the command has started has ended too."""
        self.wait_until(lambda: self.busy_s() < 0)
        deadline = time.monotonic() + GRACE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left_over = len(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.close_output()
        return self.process.returncode


class ForkedRanks:
    """Forks of this process as the ranks of one run. As torchrun does, it ends all of them when one fails.

    pid: of rank 0. returncode: the first exit code other than 0, or 0.
    """

    def __init__(
        self,
        ranks: int,
        words: list[str],
        stdout: Any,
        stderr: Any,
        environment: dict[str, str],
        prepare: Callable[[], None],
    ) -> None:
        self.returncode: int | None = None
        self.failed_at, self.first_failure = 0.0, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        environment = environment | address | size
        self.ranks = [ForkedTrain(words, stdout, stderr, environment | place, prepare) for place in places]
        self.pid = self.ranks[0].pid

    def poll(self) -> int | None:
        for rank in self.ranks:
            if rank.returncode is None and rank.poll() and not self.first_failure:
                self.first_failure, self.failed_at = rank.returncode or 0, time.monotonic()
                for other in self.ranks:
                    other.send_signal(signal.SIGTERM)
        if self.first_failure and time.monotonic() - self.failed_at > TORCHRUN_GRACE_S:
            for rank in self.ranks:
                rank.send_signal(signal.SIGKILL)
        if all(rank.returncode is not None for rank in self.ranks):
            self.returncode = self.first_failure
        return self.returncode


def forked(setting: Setting, stdout: Any, stderr: Any, environment: dict[str, str]) -> Process:
    """The command as a fork of this process, or one for each rank."""
    given = setting.typed, stdout, stderr, environment, lambda: tell(setting.doing)
    return ForkedTrain(*given) if setting.ranks == 1 else ForkedRanks(setting.ranks, *given)


def tell(path: Path) -> None:
    """Make rank 0, in its fork, write to `path` what it tells the watchdog."""

    def telling(method: Callable) -> Callable:
        def told(watchdog: Watchdog, step: int, doing: str) -> None:
            path.write_text(doing)
            method(watchdog, step, doing)

        return told

    if os.environ.get("RANK", "0") == "0":
        for kind in (Watchdog, StoreWatchdog):
            kind.at, kind.rest = telling(kind.at), telling(kind.rest)


def started(setting: Setting, stdout: Any, stderr: Any, environment: dict[str, str]) -> Process:
    """The command as a new process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.ranks}", "--max-restarts=3"]
    command = [sys.executable, *(torchrun if setting.ranks > 1 else []), str(ROOT / "train.py"), *setting.typed]
    streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    return subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **streams)


def live(setting: Setting, length_s: float, moment: random.Random) -> dict[str, Any]:
    """One command and its end, at a moment within `length_s` of its processor time. Returns how it went."""
    kind, after_s = moment.choice(setting.kinds), moment.random() * length_s
    (waits_for,) = moment.choices(list(WAIT_WEIGHTS), WAIT_WEIGHTS.values())
    draw, left_bytes = moment.random(), moment.choice([0, 0, 1, 2, 8]) * 4096
    if waits_for == "text being prepared" and any(setting.disk.glob("data/*/meta.json")):
        waits_for = None
    if waits_for == "consolidation" and "parallel=fsdp" not in setting.words:
        waits_for = None
    before, _ = whole_checkpoints(setting)
    command = Command(setting, has_reader=kind == "closed output")
    if waits_for is None or waits_for == "a save":
        running = command.wait_until(lambda: command.busy_s() > after_s)
        time.sleep(draw * 0.01)  # the system counts hundredths of a second
    if waits_for:
        running = command.wait_until(lambda: has_come(waits_for, setting))
        time.sleep(draw * WAITS_S[waits_for])
    row = {"kind": kind, "phase": phase(setting, command), "waited_for": waits_for, "at_s": round(command.busy_s(), 2)}
    target = end(setting, command, kind, draw, left_bytes) if running and command.is_running() else None
    if target is None:
        row |= {"kind": None, "waited_for": None}
    code = command.ended()
    (setting.disk / "ballast").unlink(missing_ok=True)
    after, believed_wrongly = whole_checkpoints(setting)
    row |= {"target": target, "exit_code": code, "believed_wrongly": believed_wrongly, "lost": len(before - after)}
    return row | {"left_over": command.left_over} | judged(setting, row["kind"], code)


def has_come(what: str, setting: Setting) -> bool:
    if what == "text being prepared":
        return (setting.disk / "data" / ".lock").exists()
    if what == "consolidation":
        return any(setting.run.glob("checkpoints/step-*/.writing-*"))
    if what == "a save":
        return any(setting.run.glob("checkpoints/.writing-*"))
    return setting.last_checkpoint.exists()


def end(setting: Setting, command: Command, kind: str, draw: float, left_bytes: int) -> str | None:
    """End the command, or the rank that `draw` chooses. Returns which one it was; None if it is gone already."""
    if kind == "closed output":
        command.close_output()
        return "command"
    if kind == "full disk":
        fill_disk(setting.disk, left_bytes)
        return "command"
    if isinstance(command.process, ForkedRanks):
        processes = [rank.pid for rank in command.process.ranks if rank.poll() is None]
    else:
        processes = [command.process.pid, *command.processes(having="RANK=")]
    if not processes:
        return None
    doomed = processes[int(draw * len(processes))]
    try:
        os.kill(doomed, signal.Signals[kind])
    except ProcessLookupError:
        return None
    is_rank = isinstance(command.process, ForkedRanks) or doomed != command.process.pid
    return "rank" if is_rank else "command"


def fill_disk(disk: Path, left_bytes: int) -> None:
    """Fill the disk, while the command writes to it, and give `left_bytes` back."""
    with open(disk / "ballast", "wb", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while ballast.write(bytes(1 << 16)):
                pass
        ballast.truncate(max(0, ballast.tell() - left_bytes))


def judged(setting: Setting, kind: str | None, code: int) -> dict[str, str]:
    """A finding if the exit code does not belong to the end, or there is a traceback. said: the last line of an error."""
    by_torchrun, said = (
        setting.ranks > 1 and not setting.warm,
        setting.errors.read_text(errors="replace").replace(str(setting.disk), "DISK"),
    )
    allowed = {0} | (ENDINGS[kind] if kind else set())
    if setting.ranks > 1 and kind not in (None, "closed output"):
        allowed.add(1 if by_torchrun else 6)  # torchrun's exit code for any of a rank; that of a rank that lost another
    has_traceback = "Traceback" in said and (
        f'File "{ROOT}/' in said or not by_torchrun
    )  # torchrun prints one of its own
    row = {"said": said.strip().rpartition("\n")[2][:300]} if kind == "full disk" and code and not by_torchrun else {}
    return row | ({"finding": said[-4000:] or f"exit code {code}"} if code not in allowed or has_traceback else {})


def whole_checkpoints(setting: Setting) -> tuple[set[str], int]:
    """The names of the checkpoints that a reader would look at, and how many of them are not what they should be."""
    names, believed_wrongly = set(), 0
    for path in checkpoints_of(setting.run):
        try:
            read_checkpoint(path)
            names.add(path.name)
        except UserError:
            believed_wrongly += 1
    return names, believed_wrongly


def phase(setting: Setting, command: Command) -> str:
    """What the command is doing, judged by its files, locks and output; a fork tells it."""
    data, run = setting.disk / "data", setting.run
    if is_locked(run / ".lock"):
        if any(run.glob("checkpoints/step-*/.writing-*")) or (
            setting.doing.exists() and setting.doing.read_text() == "writing the last checkpoint to the disk"
        ):
            return "consolidating"
        if any(run.glob("checkpoints/.writing-*")):
            return "saving"
        if setting.last_checkpoint.exists():
            return "ending"
        if setting.doing.exists():
            return setting.doing.read_text() or "training step"
        said = command.said()
        if "compiling the training step" in said and "compiled in" not in said:
            return "compiling"
        return "training" if read_lines(run / "metrics.jsonl") else "building"
    if is_locked(data / ".lock"):
        return "encoding" if any(data.glob("*.partial/tokenizer.json")) else "vocabulary"
    if checkpoints_of(run):
        return "resuming"
    return "starting, text prepared" if any(data.glob("*/meta.json")) else "starting"
