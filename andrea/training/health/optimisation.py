"""Checks of the optimizer's steps: spikes, clipping, and the size of the updates."""

from __future__ import annotations

import math
from typing import ClassVar, final

from andrea.config import RunConfig
from andrea.training.health.check import (
    FEWEST_STEPS,
    GRADIENT_SPIKE,
    LATEST_STEPS,
    LOSS_SPIKE,
    OPTIMIZER_REMEDY,
    Check,
    Evidence,
    Finding,
    Judgement,
    StepHistory,
    optimizer_remedy,
    remedy_settings,
)
from andrea.training.health.data import DataSummary

# ----------------------------------------------------------------------------------------------------------------- loss
# Compares the loss with two models that ignore the context: a uniform guess, and the token frequencies.


@final
class LossCheck(Check):
    """Finds a loss that is not below the loss of a uniform guess or of the token frequencies. V: vocabulary size."""

    FINDINGS: ClassVar = {
        "loss_above_uniform": Finding(
            "the loss is not below ln V, the loss of guessing every token with equal probability",
            fails_run=True,
            remedy=OPTIMIZER_REMEDY,
        ),
        "loss_above_unigram": Finding(
            "the loss is not below the loss of a model that knows only the frequency of each token",
            fails_run=True,
            remedy=OPTIMIZER_REMEDY,
        ),
    }

    def __init__(self, run: RunConfig, history: StepHistory, data: DataSummary, n_vocab: int) -> None:
        super().__init__(run, history)
        self.data, self.n_vocab = data, n_vocab

    def judge(self, evidence: Evidence) -> Judgement:
        step, warmup_steps = evidence.step, self.run.optimizer.warmup_steps
        if len(self.history.losses) < LATEST_STEPS or step < warmup_steps + LATEST_STEPS:
            return Judgement({}, {})
        train, val = self.history.current_loss(), self.data.weighted_loss(evidence.val)
        memorises = max(self.data.epochs(evidence.tokens).values()) > 1  # then a high validation loss is overfitting
        uniform, unigram = math.log(self.n_vocab), self.data.unigram_nats
        findings = {}
        if max(train, train if memorises else val) >= uniform:
            findings["loss_above_uniform"] = (
                f"the larger of training loss {train:.3f} and validation loss {val:.3f} is not below ln V = {uniform:.3f}, "
                f"the loss of a uniform guess; {optimizer_remedy(self.run.optimizer)}"
            )
        elif train >= unigram and (self.history.learned or not self.too_early(step)):
            findings["loss_above_unigram"] = (
                f"{step - warmup_steps} steps after the warm-up, training loss {train:.3f} is not "
                f"below {unigram:.3f}, the loss of a model that knows only the frequency of each token; "
                f"{optimizer_remedy(self.run.optimizer)}"
            )
        return Judgement({}, findings)


# ------------------------------------------------------------------------------------------------------------- expected
# Compares the validation figure with runs of the same recipe on the same text.

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


# --------------------------------------------------------------------------------------------------------- optimisation

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
