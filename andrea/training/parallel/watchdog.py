"""A rank that stands still would let all others wait for it in silence: a thread on each rank notices and says which.

Every rank tells the others, through torchrun's store, where it stands and that it is alive. Where a rank has not moved for
the limit, it looks at what the others told: one that has fallen silent has died or been stopped; else the one that has
come least far is what the others wait for.
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
    """What the trainer tells where it stands; of one process nobody wants to know."""

    def at(self, step: int, doing: str) -> None:
        """The main thread has come this far; from the first call on it may not stand still."""

    def rest(self, step: int, doing: str) -> None:
        """The same, but what follows may take as long as it takes."""

    def finish(self) -> None:
        """Nothing is watched any more."""


class StoreWatchdog(Watchdog):
    """board: a store that outlives the ranks, torchrun's, and holds nothing of earlier starts."""

    def __init__(self, rank: int, size: int, board: dist.Store, minutes: float) -> None:
        self.rank, self.size, self.board, self.limit_s = rank, size, board, 60 * minutes
        self.board.set_timeout(datetime.timedelta(seconds=max(10, self.limit_s / 4)))
        self.interval_s = min(2.0, self.limit_s / 8)
        self.moves, self.step, self.doing = 0, 0, "starting"
        self.moved: float | None = None
        self.over = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def at(self, step: int, doing: str) -> None:
        self.moves, self.step, self.doing, self.moved = self.moves + 1, step, doing, time.monotonic()

    def rest(self, step: int, doing: str) -> None:
        self.moves, self.step, self.doing, self.moved = self.moves + 1, step, doing, None

    def finish(self) -> None:
        self.over.set()

    # ---------------------------------------------------------------------------------------------- in the thread

    def watch(self) -> None:
        """Each rank looks after itself and after the next one, so that the store has little to do with many ranks."""
        beats, neighbour = 0, (self.rank + 1) % self.size
        heard, seen = None, time.monotonic()
        while beats == 0 or not self.over.wait(self.interval_s):  # the first word at once: a rank may fall silent early
            beats += 1
            try:
                self.tell(beats)
                now = self.notes_of([neighbour])[0]
                if now != heard:
                    heard, seen = now, time.monotonic()
                stands_still = self.moved is not None and time.monotonic() - self.moved > self.limit_s
                if stands_still or time.monotonic() - seen > self.limit_s:
                    moves, accusation = self.moves, self.accusation(beats)
                    if not stands_still or self.moves == moves:  # it may have moved on at the last moment
                        self.end(f"step {self.step}: {accusation}")
            except dist.DistError as error:  # torchrun, or the machine that it runs on, is gone
                if time.monotonic() - seen > self.limit_s:
                    self.end(f"step {self.step}: torchrun's store does not answer: {error}")

    def tell(self, beats: int) -> None:
        now = {"beats": beats, "moves": self.moves, "step": self.step, "doing": self.doing}
        self.board.set(f"rank {self.rank}", json.dumps(now))

    def notes_of(self, ranks: Iterable[int]) -> list[dict[str, Any] | None]:
        keys = [f"rank {rank}" for rank in ranks]
        return [json.loads(self.board.get(key)) if self.board.check([key]) else None for key in keys]

    def accusation(self, beats: int) -> str:
        """Which rank all wait for, from two looks at what they tell."""
        earlier = self.notes_of(range(self.size))
        for beat in range(3):
            time.sleep(self.interval_s)
            self.tell(beats + 1 + beat)
        now = self.notes_of(range(self.size))
        silent = [r for r, (old, new) in enumerate(zip(earlier, now, strict=True)) if new is None or old == new]
        least = min(about["moves"] for about in now if about is not None)
        behind = [r for r, about in enumerate(now) if about is not None and about["moves"] == least]
        if silent:
            return "; ".join(f"rank {rank} does not answer, {stands(now[rank])}" for rank in silent)
        if len(behind) < self.size:
            return "; ".join(f"rank {rank} stands still, {stands(now[rank])}" for rank in behind)
        return f"all ranks stand still, {stands(now[self.rank])}: the network or a device hangs"

    def end(self, line: str) -> None:
        """Say so, once for all ranks, and leave: the main thread waits where nothing can wake it."""
        if self.over.is_set():
            return
        hint = "raise parallel.watchdog_minutes if it only takes longer"
        words = f"error: {line} (no progress for {self.limit_s:.0f} s); {hint}"
        self.leave(words if self.first_to_say() else line)

    def leave(self, words: str) -> None:
        if words.startswith("error: "):
            print(words, file=sys.stderr, flush=True)
        os._exit(torchrun.RANK_LOST)

    def first_to_say(self) -> bool:
        try:
            return self.board.add("said", 1) == 1
        except dist.DistError:
            return True


def stands(about: dict[str, Any] | None) -> str:
    return "and never has" if about is None else f"last seen in step {about['step']}: {about['doing']}"
