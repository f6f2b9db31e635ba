"""Sharing the cores with other processes: how long waiting threads spin, and turns between processes that use all cores.

The threads of a process wait for each other many times in a training step. If two processes each have as many threads as
there are cores, a thread often waits for one that has no core at the moment, and both processes together do much less
than one alone. Therefore such processes take turns: only the one that has the turn computes, with all cores, and it
passes the turn on between two micro-batches or two generated tokens. bench/two_processes.py measures the effect.

This module imports no torch: GNU OpenMP reads the number of spins when torch loads it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from andrea.runtime.code_cache import is_private
from andrea.runtime.files import open_no_link

SPINS = 40_000  # 1,000 made a process alone up to 41 % slower, 40,000 at most 2 %
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that decide how threads wait
# A process computes as long as it has waited before it passes the turn on, but within these limits. So a text, whose
# tokens take milliseconds, gets as much time as a run, whose micro-batches take longer. The text appears in such pieces.
SHORTEST_TURN_S, LONGEST_TURN_S = 0.25, 1.0
PATIENCE_S = 5.0  # a process that has waited so long goes on without the turn: its holder may be suspended
WITHOUT_TURN_S = 60.0  # and waits again after this time
POLL_S = 0.001
TAKES_TURNS = "another process of yours computes on all cores: the two take turns, and each goes about half as fast"


def limit_spins() -> None:
    """Let the threads of this process and of its children spin SPINS times at most; what the user has set stays.

    A thread that waits for other threads of its process first spins, which keeps its core busy, and then sleeps. By
    default it spins 300,000 times, about ten milliseconds. Call this before torch is imported. On other systems than
    Linux torch uses another OpenMP, which is left as it is.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


class Turns:
    """The machine's turn, as one process takes it. Every method does nothing before `join`.

    The turn is a lock on a file in the temporary folder, for the processes of one user that may use the same cores. The
    system frees the lock of a process that dies. A second lock is the queue: the process that waits for the turn holds it,
    so that the process that has just passed the turn on cannot take it again first.
    """

    def __init__(self) -> None:
        self.files: list[int] = []  # descriptors of the two lock files: the queue, the turn
        self.depth = 0  # blocks of `taken` that are entered
        self.holds = False
        self.until = 0.0  # time.monotonic() before which nothing is asked
        self.on_wait: Callable[[], None] | None = None

    def join(self, threads: int, on_wait: Callable[[], None], folder: Path | None = None) -> bool:
        """Take part, if `threads` are more than half of the cores, so that two such processes do not fit.

        on_wait: called once, when the process first waits for another one. folder: for the locks. Returns whether this
        process takes part: not on other systems than Linux, nor where no private folder can be made.
        """
        if sys.platform != "linux" or threads <= usable_cores() / 2:
            return False
        folder = folder or Path(tempfile.gettempdir()) / f"andrea-turns-{os.geteuid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if not self.files and is_private(folder):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                cores = (
                    f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"  # processes bound to others need no turns
                )
                self.files = [open_no_link(str(folder / f"{name}-{cores}"), flags) for name in ("queue", "turn")]
        self.on_wait = on_wait
        return bool(self.files)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn within this block. A block within another one changes nothing."""
        self.depth += 1
        try:
            self.pass_on()
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.release()

    def pass_on(self) -> None:
        """Let another process compute if it waits for the turn, then go on. Call this often within a block of `taken`."""
        if self.files and self.depth and time.monotonic() >= self.until:
            self.release()
            self.take()

    def take(self) -> None:
        began = time.monotonic()
        deadline = began + PATIENCE_S
        queue, turn = self.files
        try:
            self.holds = wait_for(queue, deadline, self.say_once) and wait_for(turn, deadline, self.say_once)
        finally:
            unlock(queue)
        now = time.monotonic()
        turn_s = min(max(now - began, SHORTEST_TURN_S), LONGEST_TURN_S)
        self.until = now + (turn_s if self.holds else WITHOUT_TURN_S)

    def release(self) -> None:
        if self.files:
            unlock(self.files[1])  # also if Ctrl-C came between the lock and `holds`
        if self.holds:
            self.holds, self.until = False, 0.0

    def say_once(self) -> None:
        if self.on_wait:
            self.on_wait()
            self.on_wait = None


MACHINE = Turns()  # the turn of this process


def wait_for(file: int, deadline: float, on_wait: Callable[[], None]) -> bool:
    """Lock an open file; False if another process still holds the lock at `deadline`, in seconds of time.monotonic()."""
    import fcntl  # not on Windows

    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            on_wait()
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def usable_cores() -> int:
    """The physical cores that this process may use; the hardware threads of one core count once. Linux only."""
    usable = os.sched_getaffinity(0)
    try:
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(topology.format(cpu)).read_text() for cpu in usable})
    except OSError:
        return len(usable)
