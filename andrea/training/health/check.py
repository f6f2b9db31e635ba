"""Shared parts of the health checks: the evidence that they judge, their judgement, and the remedy that they suggest.

L layers, H heads.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import OptimizerConfig, RunConfig
from andrea.training.expected.curves import Standing
from andrea.training.health.history import StepHistory

EARLY_STEPS = 50  # after the warm-up: healthy small models have learned the token frequencies by then
OPTIMIZER_REMEDY = "smaller optimizer steps"  # docs/health.md explains it; `optimizer_remedy` names the keys


@dataclass(frozen=True)
class Finding:
    """A problem that a check can report. docs/health.md lists all of them in a table."""

    meaning: str
    fails_run: bool  # the finding counts as a failure: health.on_failure=stop ends the run
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """The measurements of one evaluation."""

    step: int
    tokens: int  # training tokens so far
    texts: Sequence[str]  # samples, without their prompts
    heads: HeadStatistics  # (L, H), over the held-out probe
    update_ratios: Tensor | None  # (matrices,): norm of the last update over norm of the weights
    val: dict[str, dict[str, float]]  # source -> {"loss": nats per token, "tokens": number of scored tokens}
    standing: Standing | None = None  # against the expected curve; None without one


class Judgement(NamedTuple):
    figures: dict[str, float]  # for the run's records
    findings: dict[str, str]  # finding's name -> message with the figure, the limit and the remedy


class Check(ABC):
    """Base class of the health checks. `judge` is called once for each evaluation."""

    FINDINGS: ClassVar[dict[str, Finding]]  # findings that the check can report, by name

    def __init__(self, run: RunConfig, history: StepHistory) -> None:
        self.run, self.history = run, history

    @abstractmethod
    def judge(self, evidence: Evidence) -> Judgement: ...

    def too_early(self, step: int) -> bool:
        """Whether it is too early to expect that the model has learned the token frequencies."""
        return step < self.run.optimizer.warmup_steps + EARLY_STEPS


def remedy_settings(*words: str) -> str:
    """'set key=value …' for a message. The words are quoted, so that they can be copied to a shell."""
    return "set " + " ".join(map(shlex.quote, words))


def optimizer_remedy(optimizer: OptimizerConfig) -> str:
    """Settings for smaller or safer optimizer steps: the safeguards that are off now, and half the learning rate."""
    rate = "matrix_learning_rate" if optimizer.kind == "muon" else "learning_rate"
    switched_off = [
        setting
        for setting, is_off in (
            ("optimizer.clip_norm=1", optimizer.clip_norm is None),
            ("optimizer.warmup_steps=100", optimizer.warmup_steps == 0),
            ("optimizer.weight_decay=0.1", optimizer.decay == 0),
        )
        if is_off
    ]
    return remedy_settings(*switched_off, f"optimizer.{rate}={getattr(optimizer, rate) / 2:g}")
