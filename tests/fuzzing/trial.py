"""Trying hostile inputs one after another, each within limits of time and memory."""

from __future__ import annotations

import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from andrea.cli.exit_code import one_line
from andrea.config import UserError

SECONDS = 5.0  # of processor time, for one input
MEGABYTES = 2048
BATCH = 500  # inputs in one hypothesis run, whose record of them grows
SHOWN = 300  # characters of an input in a finding

Handler = Callable[[Any], None]  # gives an input to the code; returns where it is accepted, raises where it is refused


class TooSlow(BaseException):
    """One input took too long. Not an Exception, which the tested code could catch."""


@dataclass(frozen=True)
class Target:
    """A border: its inputs, and a function that makes their handler, given an empty folder.

    waiting_s: the limit of the clock for one input, which may wait without computing.
    """

    inputs: SearchStrategy
    make: Callable[[Path], Handler]
    waiting_s: float = 30.0


@dataclass
class Outcome:
    """The results at one border. findings: where and what went wrong -> the first input that led there."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""
    peak_memory_mb: float = 0.0
    findings: dict[str, str] = field(default_factory=dict)


def fuzz(target: Target, folder: Path, inputs: int, first_seed: int) -> Outcome:
    """Try `inputs` inputs, one after another; equal seeds give equal inputs."""
    handle, started = target.make(folder), time.monotonic()
    outcome = Outcome(peak_memory_mb=peak_megabytes())
    while outcome.inputs < inputs:
        left = min(BATCH, inputs - outcome.inputs)

        @seed(first_seed * 1_000_003 + outcome.inputs)
        @settings(
            max_examples=left, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(target.inputs)
        def batch(tried: Any) -> None:
            try_one(handle, tried, outcome, target.waiting_s)

        batch()
    outcome.seconds = time.monotonic() - started
    return outcome


def try_one(handle: Handler, tried: Any, outcome: Outcome, waiting_s: float) -> None:
    outcome.inputs += 1
    clock = time.process_time()
    try:
        with limited(SECONDS, waiting_s):
            handle(tried)
    except UserError as error:
        outcome.refused += 1
        assert one_line(str(error)).isprintable()
    except (Exception, TooSlow) as error:  # every other exception is a finding
        place = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in place if "/andrea/" in frame.filename] or place
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        outcome.findings.setdefault(f"{where}: {type(error).__name__}: {error!s:.200}", repr(tried)[:SHOWN])
    seconds = time.process_time() - clock
    if seconds > outcome.slowest_s:
        outcome.slowest_s, outcome.slowest = seconds, repr(tried)[:SHOWN]
    if seconds > SECONDS:
        outcome.findings.setdefault(f"slow: {seconds:.1f} s", repr(tried)[:SHOWN])
    memory = peak_megabytes()
    if memory > MEGABYTES >= outcome.peak_memory_mb:
        outcome.findings.setdefault(f"memory: {memory:.0f} MB", repr(tried)[:SHOWN])
    outcome.peak_memory_mb = memory


@contextmanager
def limited(busy_s: float, waiting_s: float) -> Iterator[None]:
    """Raises TooSlow in the block after `busy_s` of processor time, or `waiting_s` of the clock, which other processes slow."""

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, busy_s), (signal.ITIMER_REAL, signal.SIGALRM, waiting_s))
    before = [signal.signal(number, too_slow) for _, number, _ in timers]
    try:
        for timer, _, seconds in timers:
            # Again after each second: an exception in a callback of the garbage collector is dropped.
            signal.setitimer(timer, seconds, 1.0)
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def peak_megabytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
