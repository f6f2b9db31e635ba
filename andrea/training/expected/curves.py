"""Where a run stands against runs of the same recipe on the same kind of text, which were measured before.

A curve holds the bits per byte of several seeds at evaluations of one planned length. It holds for a run with the same
fingerprint of its recipe (`recipe_fingerprint`: any other value of a key that decides what is learned, and there is no
curve), and on a text that its name makes sure (TEXTS), since the kind of another text would be a guess.

The learning rate decays towards the planned end, so runs of different lengths have different curves: a run has a curve if
its planned length was measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from andrea.config import RunConfig, recipe_fingerprint
from andrea.training.records import Progress

FOLDER = Path(__file__).parent
TEXTS = {
    "pystdlib": "Python's standard library",
    "shakespeare": "tinyshakespeare",
    "fineweb_edu": "FineWeb-Edu",
}  # data.kind -> its name, if data.path names no other files
FEWEST_RUNS = 2  # that show a spread
NEIGHBOURS = 1  # evaluations on either side whose deviations count for an evaluation's spread
DEVIATIONS = 2.0  # of the spread: about 19 of 20 further runs fall within


class Expected(NamedTuple):
    """Bits per byte that are expected, and by how much a run of another seed may differ."""

    bpb: float
    spread: float


@dataclass(frozen=True)
class Standing:
    """A validation figure of a run in bits per byte, and what was expected at this point of it."""

    bpb: float
    expected: Expected

    @property
    def words(self) -> str:
        difference = self.bpb - self.expected.bpb
        if abs(difference) <= self.expected.spread:
            return "as expected at this point"
        return f"{abs(difference):.3f} {'worse' if difference > 0 else 'better'} than expected at this point"


@dataclass(frozen=True)
class Curve:
    """The figures of one file: N seeds, E evaluations, the last one at the end of the run."""

    steps: int
    at: Sequence[int]  # (E,): steps of the evaluations, rising
    runs: Sequence[Sequence[float]]  # (N, E): bits per byte

    def expected(self, share: float) -> Expected | None:
        """At this share of the run; None before the first evaluation. Between two, straight in the logarithm of tokens."""
        step = share * self.steps
        after = next((index for index, at in enumerate(self.at) if step <= at * (1 + 1e-9)), None)
        if after is None or (after == 0 and step < self.at[0] * (1 - 1e-9)):
            return None
        before = max(0, after - 1)
        part = 1.0 if after == before else math.log(step / self.at[before]) / math.log(self.at[after] / self.at[before])
        return Expected(
            *(low + part * (high - low) for low, high in zip(self.point(before), self.point(after), strict=True))
        )

    def point(self, index: int) -> Expected:
        """The mean at an evaluation, and the spread: DEVIATIONS times the standard deviation of a further run from it."""
        near = range(max(0, index - NEIGHBOURS), min(len(self.at), index + NEIGHBOURS + 1))
        variance = statistics.mean(statistics.variance(run[each] for run in self.runs) for each in near)
        spread = DEVIATIONS * math.sqrt(variance * (1 + 1 / len(self.runs)))
        return Expected(statistics.mean(run[index] for run in self.runs), spread)


@dataclass(frozen=True)
class ExpectedCurves:
    """The curves of one recipe on one text, by planned length; there may be none."""

    by_length: dict[int, Curve]
    text: str = ""

    @classmethod
    def of(cls, config: RunConfig, folder: Path | None = None) -> ExpectedCurves:
        """The curves that hold for a new run with this configuration. folder: of the files; None: those of the package."""
        text = config.data.kind if config.data.path is None else ""
        if text not in TEXTS or config.init_from:
            return cls({})
        fingerprint = recipe_fingerprint(config)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder or FOLDER).glob("*.json"))]
        curves = (
            Curve(each["steps"], each["at"], list(each["bits_per_byte"].values()))
            for each in found
            if (each["recipe"], each["text"]) == (fingerprint, text)
        )
        return cls({curve.steps: curve for curve in curves if len(curve.runs) >= FEWEST_RUNS}, TEXTS[text])

    def at(self, step: int, steps: int) -> Expected | None:
        """What is expected after `step` steps of a run of `steps` steps; None without a curve, and before its beginning."""
        return self.by_length[steps].expected(step / steps) if steps in self.by_length else None

    def standing(self, bpb: float, progress: Progress) -> Standing | None:
        """How `bpb`, of the whole held-out text, compares; None for a run that has not followed one recipe."""
        if not progress.follows_recipe or not math.isfinite(bpb):
            return None
        expected = self.at(progress.step, progress.planned_steps)
        return expected and Standing(bpb, expected)

    def words_at_end(self, steps: int, model: str) -> str:
        """'1.141 ± 0.012 bits per byte at the end, …' for the plan of a run; '' if no curve tells."""
        expected = self.at(steps, steps)
        if expected is None:
            return ""
        return (
            f"{expected.bpb:.3f} ± {expected.spread:.3f} bits per byte at the end, "
            f"from {len(self.by_length[steps].runs)} runs of this recipe ({model}) on {self.text}"
        )
