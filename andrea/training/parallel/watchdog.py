"""A watchdog on each rank: when one rank stops making progress, the others report which one, and end.

Without a watchdog, the other ranks would wait for a stuck rank without a message. A thread on each rank regularly
writes the rank's status to torchrun's store: a heartbeat, the current step and the number of moves. A move is a call of
`at` or `rest`. When a rank has made no move within the time limit, its watchdog reads the status of all ranks. A rank
whose status no longer changes has died or was stopped. If there is no such rank, the others wait for the one with the
fewest moves.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from andrea.runtime import torchrun


class Watchdog:
    """The trainer reports its progress here. This base class, for a single process, does nothing."""

    def at(self, step: int, doing: str) -> None:
        """Report that the main thread begins `doing`. The time until the next call of `at` or `rest` is limited."""

    def rest(self, step: int, doing: str) -> None:
        """Like `at`, but without a time limit until the next call."""

    def finish(self) -> None:
        """Stop watching."""


class StoreWatchdog(Watchdog):
    """Watches this rank and the next one. status_store: outlives the ranks, and holds no status of earlier starts."""

    def __init__(self, rank: int, size: int, status_store: dist.Store, minutes: float) -> None:
        self.rank, self.size, self.status_store, self.limit_s = rank, size, status_store, 60 * minutes
        self.status_store.set_timeout(datetime.timedelta(seconds=max(10, self.limit_s / 4)))
        self.interval_s = min(2.0, self.limit_s / 8)
        self.moves, self.step, self.doing = 0, 0, "starting"
        self.moved_at: float | None = None  # time.monotonic(); None: no limit
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def at(self, step: int, doing: str) -> None:
        self.moves, self.step, self.doing, self.moved_at = self.moves + 1, step, doing, time.monotonic()

    def rest(self, step: int, doing: str) -> None:
        self.moves, self.step, self.doing, self.moved_at = self.moves + 1, step, doing, None

    def finish(self) -> None:
        self.finished.set()

    # ---------------------------------------------------------------------------------------------- in the thread

    def watch(self) -> None:
        """Watch this rank and the next one only, so that the store can serve many ranks."""
        beats, neighbour = 0, (self.rank + 1) % self.size
        neighbour_status, neighbour_changed_at = None, time.monotonic()
        # The first status is written at once, because a rank may die early.
        while beats == 0 or not self.finished.wait(self.interval_s):
            beats += 1
            try:
                self.write_status(beats)
                status = self.read_status([neighbour])[0]
                if status != neighbour_status:
                    neighbour_status, neighbour_changed_at = status, time.monotonic()
                is_stuck = self.moved_at is not None and time.monotonic() - self.moved_at > self.limit_s
                if is_stuck or time.monotonic() - neighbour_changed_at > self.limit_s:
                    moves, diagnosis = self.moves, self.diagnose(beats)
                    if not is_stuck or self.moves == moves:  # the main thread may have moved on at the last moment
                        self.end(f"step {self.step}: {diagnosis}")
            except dist.DistError as error:  # torchrun, or the machine that it runs on, is gone
                if time.monotonic() - neighbour_changed_at > self.limit_s:
                    self.end(f"step {self.step}: torchrun's store does not answer: {error}")

    def write_status(self, beats: int) -> None:
        status = {"beats": beats, "moves": self.moves, "step": self.step, "doing": self.doing}
        self.status_store.set(f"rank {self.rank}", json.dumps(status))

    def read_status(self, ranks: Iterable[int]) -> list[dict[str, Any] | None]:
        keys = [f"rank {rank}" for rank in ranks]
        store = self.status_store
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]

    def diagnose(self, beats: int) -> str:
        """Name the ranks that the others wait for, from two readings of every rank's status."""
        earlier = self.read_status(range(self.size))
        for beat in range(3):
            time.sleep(self.interval_s)
            self.write_status(beats + 1 + beat)
        now = self.read_status(range(self.size))
        silent = [r for r, (old, new) in enumerate(zip(earlier, now, strict=True)) if new is None or old == new]
        fewest_moves = min(status["moves"] for status in now if status is not None)
        behind = [r for r, status in enumerate(now) if status is not None and status["moves"] == fewest_moves]
        if silent:
            return "; ".join(f"rank {rank} does not answer, {last_seen(now[rank])}" for rank in silent)
        if len(behind) < self.size:
            return "; ".join(f"rank {rank} is stuck, {last_seen(now[rank])}" for rank in behind)
        return f"all ranks are stuck, {last_seen(now[self.rank])}: the network or a device hangs"

    def end(self, diagnosis: str) -> None:
        """Print the diagnosis on one rank only, and end the process, because nothing can wake the main thread."""
        if self.finished.is_set():
            return
        hint = "raise parallel.watchdog_minutes if the step is only slow"
        message = f"error: {diagnosis} (no progress for {self.limit_s:.0f} s); {hint}"
        self.leave(message if self.is_first_to_print() else diagnosis)

    def leave(self, message: str) -> None:
        if message.startswith("error: "):
            print(message, file=sys.stderr, flush=True)
        os._exit(torchrun.RANK_LOST)

    def is_first_to_print(self) -> bool:
        try:
            return self.status_store.add("printed", 1) == 1
        except dist.DistError:
            return True


def last_seen(status: dict[str, Any] | None) -> str:
    return "and never has" if status is None else f"last seen in step {status['step']}: {status['doing']}"
