"""Checks of the optimizer's steps: spikes, clipping, and the size of the updates."""

from __future__ import annotations

from typing import ClassVar, final

from andrea.training.health.check import OPTIMIZER_REMEDY, Check, Evidence, Finding, Judgement, optimizer_remedy
from andrea.training.health.history import FEWEST_STEPS, GRADIENT_SPIKE, LOSS_SPIKE

LARGEST_UPDATE_RATIO = 0.25  # of a weight matrix's norm, in one step
MOST_CLIPPED = 0.9  # share of the steps since the last evaluation


@final
class OptimisationCheck(Check):
    FINDINGS: ClassVar = {
        "loss_spikes": Finding(
            "the training loss of a step was far above the median of the steps before",
            fails_run=False,
            remedy=OPTIMIZER_REMEDY,
        ),
        "gradient_spikes": Finding(
            "the gradient norm of a step was far above the median of the steps before",
            fails_run=False,
            remedy=OPTIMIZER_REMEDY,
        ),
        "clipped_steps": Finding(
            "nearly every step's gradient was clipped: the step size is set by gradient clipping, not by the learning rate",
            fails_run=False,
            remedy=OPTIMIZER_REMEDY,
        ),
        "large_updates": Finding(
            "one step changes the median weight matrix by more than a quarter of its norm",
            fails_run=False,
            remedy=OPTIMIZER_REMEDY,
        ),
    }

    def judge(self, evidence: Evidence) -> Judgement:
        interval = self.history.interval
        clipped_share = interval["clipped"] / max(1, interval["steps"])
        figures = {
            "health/loss_spikes": interval["loss_spikes"],
            "health/gradient_spikes": interval["gradient_spikes"],
            "health/clipped_share": clipped_share,
            "health/unigram_nats": self.history.unigram_nats,
        }
        findings = self.spikes() | self.clipping(clipped_share, evidence.step)
        if evidence.update_ratios is not None:
            ratio = float(evidence.update_ratios.median())
            figures["health/update_ratio"] = ratio
            if ratio > LARGEST_UPDATE_RATIO:
                findings["large_updates"] = (
                    f"one step changes the median weight matrix by {ratio:.2g} of its norm (limit: "
                    f"{LARGEST_UPDATE_RATIO:g}); {optimizer_remedy(self.run.optimizer)}"
                )
        return Judgement(figures, findings)

    def spikes(self) -> dict[str, str]:
        kinds = {
            "loss_spikes": (
                "training loss",
                f"the median plus {LOSS_SPIKE:g} robust standard deviations",
            ),
            "gradient_spikes": (
                "gradient norm",
                f"{GRADIENT_SPIKE:g} times the median",
            ),
        }
        interval, findings = self.history.interval, {}
        for name, (figure, words) in kinds.items():
            if interval[name]:
                step, value, limit = self.history.worst[name]
                findings[name] = (
                    f"the {figure} has a spike at {interval[name]} of {interval['steps']} steps, the highest at step "
                    f"{step:.0f}: {value:.4g} is above {limit:.4g}, {words}; {optimizer_remedy(self.run.optimizer)}"
                )
        return findings

    def clipping(self, clipped_share: float, step: int) -> dict[str, str]:
        steps = self.history.interval["steps"]
        if clipped_share <= MOST_CLIPPED or steps < FEWEST_STEPS or self.too_early(step):
            return {}
        return {
            "clipped_steps": f"the gradient was clipped in {clipped_share:.0%} of {steps} steps (limit: "
            f"{MOST_CLIPPED:.0%}): the step size is set by gradient clipping "
            f"(optimizer.clip_norm={self.run.optimizer.clip_norm:g}), not by the learning rate; "
            f"{optimizer_remedy(self.run.optimizer)}"
        }
