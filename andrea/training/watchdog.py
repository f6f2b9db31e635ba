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
from typing import Any

import torch.distributed as dist

from andrea.training.distributed import Ranks

EXIT_CODE = 6  # a rank was lost: a restart may cure it


class Watchdog:
    """`at` is told by the trainer where it stands; with one process nothing watches."""

    def __init__(self, ranks: Ranks, minutes: float) -> None:
        self.ranks, self.limit_s = ranks, 60 * minutes
        self.interval_s = min(2.0, self.limit_s / 8)
        self.moves, self.step, self.doing = 0, 0, "starting"
        self.moved = time.monotonic()
        self.over = threading.Event()
        if ranks.size > 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            limit = datetime.timedelta(seconds=10)
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self.store = dist.PrefixStore(f"andrea/watchdog/{attempt}", store)
            threading.Thread(target=self.watch, daemon=True).start()

    def at(self, step: int, doing: str) -> None:
        """The main thread has come this far."""
        self.moves, self.step, self.doing, self.moved = self.moves + 1, step, doing, time.monotonic()

    def finish(self) -> None:
        self.over.set()

    # ---------------------------------------------------------------------------------------------- in the thread

    def watch(self) -> None:
        beats = 0
        while not self.over.wait(self.interval_s):
            beats += 1
            try:
                self.tell(beats)
                if time.monotonic() - self.moved > self.limit_s:
                    self.end(f"rank {self.ranks.rank}: step {self.step}: {self.accusation(beats)}")
            except dist.DistError as error:  # torchrun itself, or the machine it runs on, is gone
                if time.monotonic() - self.moved > self.limit_s:
                    self.end(f"rank {self.ranks.rank}: step {self.step}: no rank can be asked: {error}")

    def tell(self, beats: int) -> None:
        now = {"beats": beats, "moves": self.moves, "step": self.step, "doing": self.doing}
        self.store.set(f"rank {self.ranks.rank}", json.dumps(now))

    def told(self) -> list[dict[str, Any] | None]:
        keys = [f"rank {rank}" for rank in range(self.ranks.size)]
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def accusation(self, beats: int) -> str:
        """Which rank all wait for, from two looks at what they tell."""
        earlier = self.told()
        for beat in range(3):
            time.sleep(self.interval_s)
            self.tell(beats + 1 + beat)
        now = self.told()
        silent = [r for r, (old, new) in enumerate(zip(earlier, now, strict=True)) if new is None or old == new]
        least = min((about["moves"] for about in now if about is not None), default=0)
        behind = [r for r, about in enumerate(now) if about is not None and about["moves"] == least]
        if silent:
            return "; ".join(f"rank {rank} does not answer, {stands(now[rank])}" for rank in silent)
        if len(behind) < self.ranks.size:
            return "; ".join(f"rank {rank} stands still, {stands(now[rank])}" for rank in behind)
        return f"all ranks stand still, {stands(now[self.ranks.rank])}: the network or a device hangs"

    def end(self, line: str) -> None:
        """Say so, once for all ranks, and leave: the main thread waits where nothing can wake it."""
        if self.over.is_set():
            return
        if self.first_to_say():
            hint = "raise parallel.watchdog_minutes if it only takes longer"
            print(f"error: {line} ({self.limit_s:.0f} s); {hint}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    def first_to_say(self) -> bool:
        try:
            return self.store.add("said", 1) == 1
        except dist.DistError:
            return True


def stands(about: dict[str, Any] | None) -> str:
    return "and never has" if about is None else f"last seen in step {about['step']}: {about['doing']}"
