"""Checks of the optimizer's steps: spikes, clipping, and the size of the updates."""

from __future__ import annotations

from typing import ClassVar, final

from andrea.training.health.check import OPTIMIZER_REMEDY, Check, Evidence, Finding, Judgement, optimizer_remedy
from andrea.training.health.history import FEWEST_STEPS


@final
class OptimisationCheck(Check):
    FINDINGS: ClassVar = {
        "loss_spikes": Finding(
            "the training loss of a step was far above the median of the steps before",
            fails_run=False,
            keys=("loss_spike",),
            remedy=OPTIMIZER_REMEDY,
        ),
        "gradient_spikes": Finding(
            "the gradient norm of a step was far above the median of the steps before",
            fails_run=False,
            keys=("gradient_spike",),
            remedy=OPTIMIZER_REMEDY,
        ),
        "clipped_steps": Finding(
            "nearly every step's gradient was clipped: the step size is set by gradient clipping, not by the learning rate",
            fails_run=False,
            keys=("clipped_share",),
            remedy=OPTIMIZER_REMEDY,
        ),
        "large_updates": Finding(
            "one step changes the median weight matrix by more than `update_ratio` of its norm",
            fails_run=False,
            keys=("update_ratio",),
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
            if ratio > self.config.update_ratio:
                findings["large_updates"] = (
                    f"one step changes the median weight matrix by {ratio:.2g} of its norm (limit: health.update_ratio="
                    f"{self.config.update_ratio:g}); {optimizer_remedy(self.run.optimizer)}"
                )
        return Judgement(figures, findings)

    def spikes(self) -> dict[str, str]:
        kinds = {
            "loss_spikes": (
                "training loss",
                f"the median plus health.loss_spike={self.config.loss_spike:g} robust standard deviations",
            ),
            "gradient_spikes": (
                "gradient norm",
                f"health.gradient_spike={self.config.gradient_spike:g} times the median",
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
        if clipped_share <= self.config.clipped_share or steps < FEWEST_STEPS or self.too_early(step):
            return {}
        return {
            "clipped_steps": f"the gradient was clipped in {clipped_share:.0%} of {steps} steps (limit: "
            f"health.clipped_share={self.config.clipped_share:g}): the step size is set by gradient clipping "
            f"(optimizer.clip_norm={self.run.optimizer.clip_norm:g}), not by the learning rate; "
            f"{optimizer_remedy(self.run.optimizer)}"
        }
