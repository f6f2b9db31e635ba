"""Compares the validation figure with runs of the same recipe on the same text."""

from __future__ import annotations

from typing import ClassVar, final

from andrea.training.health.check import Check, Evidence, Finding, Judgement, remedy_settings

WORSE_BPB = 0.03  # bits per byte beyond the spread over seeds
# What the recipe does not decide, but may spoil a result: each is replaced by its slow, plain form.
PLAIN = ("precision=fp32", "compile=off", "attention.implementation=reference")


@final
class ExpectedCheck(Check):
    FINDINGS: ClassVar = {
        "worse_than_expected": Finding(
            "validation is worse than in runs of the same recipe on the same text, by more than seeds explain",
            fails_run=False,
            remedy="check the prepared text; if it is right, compare a run with precision=fp32 and plain attention",
        ),
    }

    def judge(self, evidence: Evidence) -> Judgement:
        standing = evidence.standing
        if standing is None:
            return Judgement({}, {})
        worse = standing.bpb - standing.expected.bpb
        if worse <= standing.expected.spread + WORSE_BPB:
            return Judgement({}, {})
        plain = self.plain_words()
        message = (
            f"validation {standing.bpb:.3f} bits per byte is {worse:.3f} worse than runs of the same recipe on the same kind of "
            f"text at this point ({standing.expected.bpb:.3f} ± {standing.expected.spread:.3f}; limit: "
            f"{WORSE_BPB:g} beyond that); likely causes: a text that was cut or damaged, "
            f"or a numerical fault of this machine's fast paths"
            + (f"; to rule the second out, {remedy_settings(*plain)}" if plain else "")
        )
        return Judgement({}, {"worse_than_expected": message})

    def plain_words(self) -> list[str]:
        """The words of PLAIN that the run does not have already."""
        run = self.run
        now = {f"precision={run.precision}", f"compile={run.compile}"}
        now.add(f"attention.implementation={run.attention.implementation}")
        return [word for word in PLAIN if word not in now]
