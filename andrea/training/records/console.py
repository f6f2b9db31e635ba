"""The console: a live progress line on a terminal, and permanent lines for evaluations, samples and alerts."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from andrea.runtime.files import lines_of
from andrea.runtime.streams import at_words, drawable, without_controls
from andrea.training.expected.curves import Expected, Standing
from andrea.training.records import Logger

REFRESH_SECONDS = 0.25


@final
class Console(Logger):
    """Prints a run's progress. Without a terminal (a pipe, a log file) every training record is a permanent line."""

    def __init__(self, steps: int, quiet: bool = False) -> None:
        """steps: number of steps of the whole run. quiet: print nothing; true on every rank except 0."""
        from rich.console import Console as RichConsole
        from rich.live import Live

        self.steps = steps
        file: Any = drawable(sys.stdout)  # None: whatever sys.stdout is when a line is printed
        self.rich = RichConsole(file=file, highlight=False, soft_wrap=True, emoji=False, markup=False, quiet=quiet)
        shows_live = self.rich.is_terminal and not quiet
        self.live = Live(console=self.rich, auto_refresh=False, transient=True) if shows_live else None
        self.last_refresh = 0.0  # time.monotonic() when the live line was last drawn
        self.bits_per_byte: float | None = None  # of the last evaluation
        self.seconds_left: Callable[[], float] | None = None  # of train.max_minutes

    def say(self, *lines: str) -> None:
        """Print permanent lines. Control characters in them, such as those of a sample, are escaped."""
        for line in lines:
            self.rich.print(at_words(without_controls(line)))

    @contextmanager
    def live_line(self) -> Iterator[None]:
        if self.live:
            self.live.start()
        try:
            yield
        finally:
            self.stop()

    def waiting(self, line: str) -> None:
        """Show slow work between steps in the live line. Without a terminal, do nothing."""
        if self.live:
            self.live.update(line, refresh=True)

    def step(self, step: int, loss: float, rate: float, tokens_per_second: float, seconds_left: float) -> None:
        """Update the live line, at most once in REFRESH_SECONDS. rate: the learning rate as a share of its peak."""
        if self.live and time.monotonic() - self.last_refresh > REFRESH_SECONDS:
            self.last_refresh = time.monotonic()
            self.live.update(self.progress_line(step, loss, rate, tokens_per_second, seconds_left), refresh=True)

    def progress_line(self, step: int, loss: float, rate: float, tokens_per_second: float, seconds_left: float) -> str:
        validation = f" · validation {self.bits_per_byte:.3f} bits/byte" if self.bits_per_byte is not None else ""
        return (
            f"{self.step_words(step)} · {tokens_per_second:,.0f} tokens/s · loss {loss:.3f}{validation}"
            f" · learning rate {rate:.0%} of peak · {self.left_words(seconds_left)}"
        )

    def left_words(self, seconds_left: float) -> str:
        """The time until the end: of the remaining steps, or of train.max_minutes if they take longer."""
        if self.seconds_left is None or not 0 < self.seconds_left() < seconds_left:
            return f"{format_duration(seconds_left)} left"
        return f"{format_duration(self.seconds_left())} left of train.max_minutes"

    def step_words(self, step: int) -> str:
        return f"step {step:>{len(str(self.steps))}}/{self.steps}"

    def record(self, record: dict[str, Any]) -> None:
        """Print a line for an evaluation, and for a training record if there is no live line."""
        if "event" in record:
            return
        self.bits_per_byte = record.get("val/bpb", self.bits_per_byte)
        if "val/bpb" in record:
            of_sources = "".join(
                f" · {key.split('/')[1]} {value:.4f}"
                for key, value in record.items()
                if key.count("/") == 2 and key.endswith("/bpb")
            )
            names = {"val/accuracy": "preference accuracy", "val/margin": "reward margin", "val/reward": "reward"}
            of_objective = "".join(f" · {words} {record[key]:.3f}" for key, words in names.items() if key in record)
            standing = ""
            if "expected/bpb" in record:
                expected = Expected(record["expected/bpb"], record["expected/spread_bpb"])
                standing = f" · {Standing(record['val/bpb'], expected).words}"
            self.say(
                f"{self.step_words(record['step'])} · validation loss {record['val/loss']:.4f}"
                f" · {record['val/bpb']:.4f} bits/byte{of_sources}{of_objective}"
                f"{part_words(record.get('val/tokens'))}{standing}"
            )
        elif self.live is None and "train/loss" in record:
            seconds_left = (self.steps - record["step"]) * record["train/seconds_per_step"]
            loss = math.nan if record["train/loss"] is None else record["train/loss"]
            figures = (record[f"train/{name}"] for name in ("rate", "tokens_per_second"))
            self.say(self.progress_line(record["step"], loss, *figures, seconds_left))

    def sample(self, sample: dict[str, Any]) -> None:
        written = sample["prompt"] + sample["text"]
        text = "\n".join(at_words("  │ " + line, "  │ ") for line in lines_of(written)) or "  (no text)"
        self.say(f"sample at step {sample['step']}:\n{text}")

    def alert(self, alert: dict[str, Any]) -> None:
        self.say(f"health: step {alert['step']}: {alert['finding']}: {alert['message']}")

    def finish(self, exit_code: int) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the live line, so that ordinary lines can follow."""
        if self.live:
            self.live.stop()


def part_words(n_token: int | None) -> str:
    """Words on an evaluation that had no time for all of the held-out text; empty if it read all of it."""
    return f" on {n_token:,} held-out tokens only, for want of time, not compared with others" if n_token else ""


# ---------------------------------------------------------------------------------------- numbers as people read them

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_number(number: float) -> str:
    """Three digits and a unit: 3.34M, 466M, 1.02B; from 10^15 on, 1.20e+17."""
    if number >= 1e15:
        return f"{number:.2e}"
    rounded = float(f"{number:.3g}")
    unit, name = next((pair for pair in UNITS if rounded >= pair[0]), (1, ""))
    rounded /= unit
    return f"{rounded:g}" if not name else f"{rounded:.{2 - math.floor(math.log10(rounded))}f}{name}"


def format_duration(seconds: float) -> str:
    """One or two units: 45 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def format_memory(n_byte: float) -> str:
    """0.85 MiB, 12.5 MiB, 3.27 GiB: three digits, in GiB from 1 GiB on."""
    size, unit = (n_byte / 2**30, "GiB") if n_byte >= 2**30 else (n_byte / 2**20, "MiB")
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {unit}"
