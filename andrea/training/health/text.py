"""Checks of the samples: text that repeats one loop, and text with far less variety than held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np

from andrea.config import RunConfig
from andrea.training.health.check import (
    OPTIMIZER_REMEDY,
    Check,
    Evidence,
    Finding,
    Judgement,
    optimizer_remedy,
    remedy_settings,
)
from andrea.training.health.history import StepHistory
from andrea.training.health.reference_text import VARIETY, ReferenceText, TextFigures

FAILING_SHARE = 0.5  # of the texts: even a healthy small model writes a loop in one sample of five
REPETITION = 0.4  # a text is a loop if one repeated unit covers more than this share of it
LEAST_VARIETY = 0.5  # of the least varied validation text
SHOWN_UNIT_CHARACTERS = 40  # of a loop's unit, in a message
SHOWN_VARIETY = {
    "distinct_1": "words",
    "distinct_2": "word pairs",
    "distinct_3": "word triples",
    "vocabulary": "tokens",
    "compression": "compressed size",
}
REMEDY = f"start again from the best checkpoint (`init_from`); {OPTIMIZER_REMEDY}"


@final
class TextCheck(Check):
    FINDINGS: ClassVar = {
        "repeated_word": Finding(
            "most samples repeat one word, which real text rarely does",
            fails_run=True,
            remedy=REMEDY,
        ),
        "repeated_phrase": Finding(
            "most samples repeat one phrase, which real text rarely does",
            fails_run=True,
            remedy=REMEDY,
        ),
        "repeated_punctuation": Finding(
            "most samples repeat the same punctuation marks, which real text rarely does",
            fails_run=True,
            remedy=REMEDY,
        ),
        "poor_text": Finding(
            "most samples are far less varied than the least varied validation text, in words, word pairs, word triples or "
            "tokens, or in compressed size",
            fails_run=False,
            remedy=REMEDY,
        ),
    }

    def __init__(self, run: RunConfig, history: StepHistory, reference: ReferenceText | None) -> None:
        """reference: None if the run writes no samples."""
        super().__init__(run, history)
        self.reference = reference

    def judge(self, evidence: Evidence) -> Judgement:
        figures, findings = self.judge_samples(evidence.texts, evidence.step)
        again = f"start again from the best checkpoint ({remedy_settings(f'init_from={self.run.name}')})"
        remedy = f"{again}, and {optimizer_remedy(self.run.optimizer)}"
        return Judgement(figures, {name: f"{message}; {remedy}" for name, message in findings.items()})

    def judge_samples(self, texts: Sequence[str], step: int) -> Judgement:
        """The judgement without remedies. No findings before the model has learned more than token frequencies."""
        if self.reference is None:
            return Judgement({}, {})
        judgement = judge_texts(texts, self.reference)
        if self.too_early(step) and not self.history.learned:
            return judgement._replace(findings={})
        return judgement


def judge_texts(texts: Sequence[str], reference: ReferenceText) -> Judgement:
    """Figures and findings of samples. Empty if fewer than half of the samples are long enough to judge."""
    judged = [figures for text in texts if (figures := TextFigures.of(text, reference.tokenizer)) is not None]
    if not judged or len(judged) < len(texts) / 2 or not reference.windows:
        return Judgement({}, {})
    figures: dict[str, float] = {
        "health/text/judged": len(judged),
        "health/text/loop_share": float(np.mean([each.loop.share for each in judged])),
        "health/text/loop_share_validation": float(np.mean([each.loop.share for each in reference.windows])),
    }
    for name in VARIETY:
        figures[f"health/text/{name}"] = float(np.median([getattr(each, name) for each in judged]))
        figures[f"health/text/{name}_validation"] = reference.median(name)
    return Judgement(figures, find_loops(judged, reference) or find_poor_text(judged, reference))


def find_loops(judged: Sequence[TextFigures], reference: ReferenceText) -> dict[str, str]:
    """The most frequent kind of loop, if the share of samples that loop is at least FAILING_SHARE, and above chance.

    A share r of the held-out windows are loops, so the number of loops in n real texts is binomial. Chance explains at
    most its mean plus three standard deviations: n (r + 3 √(r (1 - r) / n)).
    """
    looping = [each.loop for each in judged if each.loop.covers(REPETITION)]
    real = reference.looping_share(REPETITION)
    chance = real + 3 * (real * (1 - real) / len(judged)) ** 0.5
    if not looping or len(looping) < FAILING_SHARE * len(judged) or len(looping) <= chance * len(judged):
        return {}
    names = [loop.finding for loop in looping]
    name = max(sorted(set(names)), key=names.count)
    worst = max((loop for loop in looping if loop.finding == name), key=lambda loop: loop.share)
    unit = " ".join(worst.unit)
    shown = unit if len(unit) <= SHOWN_UNIT_CHARACTERS else unit[: SHOWN_UNIT_CHARACTERS - 1] + "…"
    return {
        name: f"{len(looping)} of {len(judged)} samples repeat themselves: "
        f"in the worst, {shown!r} makes up {worst.share:.0%} of the text (limit: "
        f"{REPETITION:.0%}). Of the validation texts, {real:.1%} repeat themselves"
    }


def find_poor_text(judged: Sequence[TextFigures], reference: ReferenceText) -> dict[str, str]:
    """Finds samples that do not loop but have far less variety than real text, such as a few words in random order.

    Short samples are left out, because few tokens have little variety. Tables are left out too.
    """
    long = [each for each in judged if each.tokens >= reference.median("tokens") / 2 and not each.tabular]
    rows = [{name: reference.relative_variety(each, name) for name in VARIETY} for each in long]
    poor = [row for row in rows if min(row.values()) < LEAST_VARIETY]
    if not poor or len(poor) < FAILING_SHARE * len(judged):
        return {}
    worst = min(poor, key=lambda row: min(row.values()))
    low = ", ".join(f"{SHOWN_VARIETY[name]} {share:.0%}" for name, share in worst.items() if share < LEAST_VARIETY)
    return {
        "poor_text": f"{len(poor)} of {len(judged)} samples have little "
        f"variety. The worst sample, relative to the least varied validation text: {low} (limit: "
        f"{LEAST_VARIETY:.0%})"
    }
