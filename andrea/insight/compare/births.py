"""When a run's heads were born: the first measurement at which some head passes the threshold of a pattern.

L layers, H heads. The patterns and their thresholds are those by which the lens names heads (andrea/insight/lens/scores.py).
Training measures them about twenty times in a run, so a birth is known to within a twentieth of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from andrea.insight.compare.runs import Run, axes_of
from andrea.insight.lens.scores import NAMES, HeadName
from andrea.training.records.console import format_number


@dataclass(frozen=True)
class Best:
    """The highest score of a pattern at one measurement. record: the record of that measurement."""

    record: dict[str, Any]
    score: float  # share of the head's weight
    head: str  # LAYER.HEAD, counted from 0


def best_heads(run: Run, name: HeadName) -> list[Best]:
    """The head with the highest score at each measurement; measurements without scores are left out."""
    found = []
    for record in run.heads:
        table = record["tables"].get(f"{name.score}_score", [])
        scored = [
            (score, f"{layer}.{head}")
            for layer, row in enumerate(table)
            for head, score in enumerate(row)
            if score is not None
        ]
        if scored:
            found.append(Best(record, *max(scored, key=lambda each: each[0])))
    return found


def birth_of(run: Run, name: HeadName) -> Best | None:
    """The first measurement at which a head has the threshold; None if none had it."""
    return next((best for best in best_heads(run, name) if best.score >= name.threshold), None)


def birth_lines(runs: Sequence[Run]) -> list[str]:
    """One line for each pattern that a head of some run has, with the tokens after which each run has its first such head."""
    lines = []
    for name in NAMES:
        births = [(run, birth_of(run, name)) for run in runs if best_heads(run, name)]
        if any(birth for _, birth in births):
            texts = [f"{run.name} {birth_text(run, birth)}" for run, birth in births]
            lines.append(f"{name.title} head, first seen: {'; '.join(texts)}")
    return lines


def birth_text(run: Run, birth: Best | None) -> str:
    if birth is None:
        return f"none in {format_number(run.tokens)} tokens"
    return f"{format_number(birth.record['tokens'])} tokens (step {birth.record['step']:,}, head {birth.head})"


def births_data(run: Run) -> dict[str, Any]:
    """What the page draws of one run: the in-context score, and the best head of each pattern, at each measurement."""
    shown = {name.score: best_heads(run, name) for name in NAMES}
    births = {name.score: birth_of(run, name) for name in NAMES}
    return {
        "in_context": [
            axes_of(record) | {"nats": record["in_context_nats"]} for record in run.heads if "in_context_nats" in record
        ],
        "patterns": {
            score: {
                "points": [axes_of(best.record) | {"score": best.score, "head": best.head} for best in found],
                "born": found.index(births[score]) if births[score] else None,
                "text": birth_text(run, births[score]),
            }
            for score, found in shown.items()
            if found
        },
    }
