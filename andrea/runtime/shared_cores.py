"""Sharing the cores with other programs: threads that wait for each other spin only while nobody else wants the core.

The threads of a process wait for each other many times in a training step. A thread that waits first spins, which keeps
its core busy, and then sleeps. A process alone is faster with long spins: waking a thread takes longer than most waits. If
another program computes on the same cores, a thread often waits for one that has no core at the moment. Then spinning
only takes time from that thread, and from the other program. Therefore the system is asked every second how long this
process's threads were ready to run but had no core. If that is long, they spin no more until it is short again. The number
of threads stays, and with it every figure. bench/two_processes.py measures the effect.

This module imports no torch: GNU OpenMP reads the number of spins when torch loads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from pathlib import Path

SPINS = 40_000  # 1,000 made a process alone up to 41 % slower, 40,000 at most 2 %
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that decide how threads wait
PERIOD_S = 1.0
BUSY_SHARE = 0.1  # of the period: all threads together were ready for longer than this without a core
QUIET_PERIODS = 3  # in a row, before threads spin again


def limit_spins() -> None:
    """Let the threads of this process and of its children spin SPINS times at most; what the user has set stays.

    By default GNU OpenMP spins 300,000 times, about ten milliseconds. Call this before torch is imported. On other systems
    than Linux torch uses another OpenMP, which is left as it is.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


@functools.cache
def share_cores() -> None:
    """Watch for other programs from now on, in a thread of its own. Linux and GNU OpenMP only; once per process."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel") and waited_ns() is not None:
        cores = len(os.sched_getaffinity(0))
        threading.Thread(target=watch, args=(cores,), name="shared cores", daemon=True).start()


def watch(cores: int) -> None:
    """Change how threads wait whenever other programs begin or end to use these cores."""
    calm: ShortWaits | None = None
    quiet, before = 0, waited_ns() or 0
    while True:
        time.sleep(PERIOD_S)
        now = waited_ns() or before
        is_busy, before = now - before > BUSY_SHARE * PERIOD_S * 1e9, now
        quiet = 0 if is_busy else quiet + 1
        if is_busy and calm is None:
            calm = ShortWaits(cores)
        elif calm is not None and quiet >= QUIET_PERIODS:
            calm = calm.end()


def waited_ns() -> int | None:
    """How long this process's threads have been ready to run without a core, in ns; None if the system doesn't say."""
    total = 0
    try:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                total += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return total


class ShortWaits:
    """While this object holds, a waiting thread of this process sleeps almost at once.

    GNU OpenMP has no call for that. But it spins 100 times only (its manual, GOMP_SPINCOUNT) as long as a process has more
    threads than cores. A thread that has once computed with a team keeps it, asleep.
    """

    def __init__(self, cores: int) -> None:
        self.ended = threading.Event()
        threading.Thread(target=self.hold, args=(cores + 1,), name="short waits", daemon=True).start()

    def hold(self, size: int) -> None:
        library = ctypes.CDLL(None)
        nothing = ctypes.cast(library.getpid, ctypes.c_void_p)  # what each thread of the team calls
        library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        self.ended.wait()  # the team ends together with this thread

    def end(self) -> None:
        self.ended.set()
