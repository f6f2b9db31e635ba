"""Sharing the cores with other programs: threads that wait for each other spin only while nobody else wants the core.

The threads of a process wait for each other many times in a training step. A thread that waits first spins, which keeps
its core busy, and then sleeps. A process alone is faster with long spins: waking a thread takes longer than most waits. If
another program computes on the same cores, a thread often waits for one that has no core at the moment. Then spinning
only takes time from that thread, and from the other program. Therefore the system is asked every second how long this
process's threads were ready to run but had no core. If that is long, they spin no more, and on two cores share one, until
the cores are free again. The number of threads stays, and with it every figure. bench/two_processes.py measures the effect.

This module imports no torch: GNU OpenMP reads the number of spins when torch loads it.
"""

import contextlib
import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SPINS = 40_000  # 1,000 made a process alone up to 41 % slower, 40,000 at most 2 %
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that decide how threads wait
PERIOD_S = 1.0
BUSY_SHARE = 0.3  # of the period: all threads together were ready for longer than this without a core
QUIET_PERIODS = 3  # in a row, before threads spin again
FREE_SHARE = 0.5  # of the period: a core that is idle for longer is free
OWN_SHARE = 0.7  # of the period: on a core of its own, this process computes for longer


def limit_spins() -> None:
    """Let the threads of this process and of its children spin SPINS times at most; what the user has set stays.

    By default GNU OpenMP spins 300,000 times, about ten milliseconds. Call this before torch is imported. On other systems
    than Linux torch uses another OpenMP, which is left as it is.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


@contextlib.contextmanager
def sharing_cores(active: bool = True) -> Iterator[None]:
    """Context in which this process's threads make way for other programs. Linux and GNU OpenMP only.

    Start no process within it: it would stay on the core on which this process is at that moment.
    """
    if not active or not can_watch():
        yield
        return
    ended = threading.Event()
    watching = threading.Thread(target=watch, args=(sorted(os.sched_getaffinity(0)), ended), name="shared cores")
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def can_watch() -> bool:
    """Whether the system tells what `watch` asks, and torch's threads are those of GNU OpenMP."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return False
    try:
        return waited_ns() >= 0 and bool(idle_seconds(sorted(os.sched_getaffinity(0))))
    except (OSError, LookupError, ValueError):  # some containers hide these files, or a part of them
        return False


def watch(cores: list[int], ended: threading.Event) -> None:
    """Until `ended`, change how threads wait, and on two cores where they run, as other programs come and go."""
    waits: ShortWaits | None = None
    quiet, waited, idle, busy_s = 0, waited_ns(), idle_seconds(cores), time.process_time()
    while not ended.wait(PERIOD_S):
        before, idle_before, busy_before = waited, idle, busy_s
        waited, idle, busy_s = waited_ns(), idle_seconds(cores), time.process_time()
        is_busy = waited - before > BUSY_SHARE * PERIOD_S * 1e9
        if waits is None:
            quiet, waits = 0, ShortWaits(cores) if is_busy else None
            continue
        if waits.place is not None:  # there our own threads wait for each other: is the other core free?
            is_busy = idle[1 - waits.place] - idle_before[1 - waits.place] < FREE_SHARE * PERIOD_S
        quiet = 0 if is_busy else quiet + 1
        if quiet >= QUIET_PERIODS:
            waits = waits.end()
        elif waits.place is not None:
            is_shared = busy_s - busy_before < OWN_SHARE * PERIOD_S
            waits.stay(1 - waits.place if is_shared and random.random() < 0.5 else waits.place)
    if waits is not None:
        waits.end()


def waited_ns() -> int:
    """How long this process's threads have been ready to run without a core, in ns."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            total += int((thread / "schedstat").read_text().split()[1])
    return total


def idle_seconds(cores: list[int]) -> list[float]:
    """How long each core has had nothing to do."""
    lines = Path("/proc/stat").read_text().split("\n")
    times = dict(line.split(maxsplit=1) for line in lines if line.startswith("cpu"))
    return [int(times[f"cpu{core}"].split()[3]) / os.sysconf("SC_CLK_TCK") for core in cores]


class ShortWaits:
    """While this object holds, a waiting thread of this process sleeps almost at once. On two cores all threads share one.

    GNU OpenMP has no call for that. But it spins 100 times only (its manual, GOMP_SPINCOUNT) as long as a process has more
    threads than cores. A thread that has once computed with a team keeps it, asleep.

    Waking a thread on the same core is quick, and the other programs move to the other core. Otherwise the slower thread,
    which shares its core, would set the pace. More than two cores were not measured; there the threads stay free.
    """

    def __init__(self, cores: list[int]) -> None:
        self.cores, self.ended = cores, threading.Event()
        threading.Thread(target=self.hold, args=(len(cores) + 1,), name="short waits", daemon=True).start()
        self.place = random.randrange(2) if len(cores) == 2 else None  # of all threads, in `cores`
        if self.place is not None:
            self.stay(self.place)

    def hold(self, size: int) -> None:
        library = ctypes.CDLL(None)
        nothing = ctypes.cast(library.getpid, ctypes.c_void_p)  # what each thread of the team calls
        library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        self.ended.wait()  # the team ends together with this thread

    def stay(self, place: int) -> None:
        self.place = place
        bind([self.cores[place]])

    def end(self) -> None:
        bind(self.cores)
        self.ended.set()


def bind(cores: list[int]) -> None:
    """Let every thread of this process run on these cores only."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)
