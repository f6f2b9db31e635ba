"""Compares the loss with two models that ignore the context: a uniform guess, and the token frequencies."""

from __future__ import annotations

import math
from typing import ClassVar, final

from andrea.config import RunConfig
from andrea.training.health.check import OPTIMIZER_REMEDY, Check, Evidence, Finding, Judgement, optimizer_remedy
from andrea.training.health.data import DataSummary
from andrea.training.health.history import LATEST_STEPS, StepHistory


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
