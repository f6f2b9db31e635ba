"""The terminal: one live line while it trains, a plain line for each record that lasts; plain lines alone elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from andrea.training.records.loggers import Logger

REFRESH_SECONDS = 0.25
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))  # of counts


class Console(Logger):
    """On a terminal a live line follows every step and evaluations stay; without one each record is a plain line."""

    def __init__(self, steps: int, quiet: bool = False) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self.steps = steps
        self.rich = RichConsole(highlight=False, soft_wrap=True, emoji=False, markup=False, quiet=quiet)
        shows_live = self.rich.is_terminal and not quiet
        self.live = Live(console=self.rich, auto_refresh=False, transient=True) if shows_live else None
        self.last_refresh = 0.0
        self.bits_per_byte: float | None = None
        self.tokens_per_second: float | None = None

    def say(self, line: str) -> None:
        self.rich.print(line)

    def start(self) -> None:
        if self.live:
            self.live.start()

    def waiting(self, line: str) -> None:
        """What takes a while between steps; shown on a terminal only."""
        if self.live:
            self.live.update(line, refresh=True)

    def step(self, step: int, loss: float, rate: float, tokens_per_second: float, seconds_left: float) -> None:
        """Renew the live line, at most a few times a second."""
        if self.live and time.monotonic() - self.last_refresh > REFRESH_SECONDS:
            self.last_refresh = time.monotonic()
            self.live.update(self.line(step, loss, rate, tokens_per_second, seconds_left), refresh=True)

    def line(self, step: int, loss: float, rate: float, tokens_per_second: float, seconds_left: float) -> str:
        bits = f" · {self.bits_per_byte:.3f} bits/byte" if self.bits_per_byte is not None else ""
        return (
            f"step {step:>{len(str(self.steps))}}/{self.steps} · {tokens_per_second:,.0f} tokens/s · loss {loss:.3f}{bits}"
            f" · rate {rate:.0%} of peak · {duration(seconds_left)} left"
        )

    def record(self, record: dict[str, Any]) -> None:
        if "event" in record:
            return
        self.bits_per_byte = record.get("val/bpb", self.bits_per_byte)
        self.tokens_per_second = record.get("train/tokens_per_second", self.tokens_per_second)
        if "val/bpb" in record:
            sources = "".join(
                f" · {key.split('/')[1]} {value:.4f}"
                for key, value in record.items()
                if key.count("/") == 2 and key.endswith("/bpb")
            )
            self.say(
                f"step {record['step']:>{len(str(self.steps))}}/{self.steps} · validation loss {record['val/loss']:.4f}"
                f" · {record['val/bpb']:.4f} bits/byte{sources}"
            )
        elif self.live is None and "train/loss" in record:
            left = (self.steps - record["step"]) * record["train/seconds_per_step"]
            self.say(
                self.line(
                    record["step"], record["train/loss"], record["train/rate"], record["train/tokens_per_second"], left
                )
            )

    def sample(self, sample: dict[str, Any]) -> None:
        text = "\n".join("  │ " + line for line in (sample["prompt"] + sample["text"]).splitlines())
        self.say(f"sample at step {sample['step']}:\n{text}")

    def page(self, page: dict[str, Any]) -> None:
        """A terminal shows none."""

    def alert(self, alert: dict[str, Any]) -> None:
        self.say(f"health: step {alert['step']}: {alert['finding']}: {alert['message']}")

    def finish(self, exit_code: int) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the live line away, so that ordinary lines follow."""
        if self.live:
            self.live.stop()


def short(number: float) -> str:
    """Three digits and a unit: 3.34M, 466M, 1.02B; from 10^15 on, 1.2e+17."""
    if number >= 1e15:
        return f"{number:.2e}"
    rounded = float(f"{number:.3g}")
    unit, name = next((pair for pair in UNITS if rounded >= pair[0]), (1, ""))
    rounded /= unit
    return f"{rounded:g}" if not name else f"{rounded:.{2 - math.floor(math.log10(rounded))}f}{name}"


def duration(seconds: float) -> str:
    """45 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
