"""What the health checks share: the evidence they judge, the judgement they return, and the remedy they suggest.

L layers, H heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import OptimizerConfig, RunConfig
from andrea.training.health.history import StepHistory

OPTIMIZER_REMEDY = "smaller optimizer steps"  # docs/health.md explains it; `optimizer_remedy` names the keys


@dataclass(frozen=True)
class Finding:
    """One row of the table in docs/health.md."""

    meaning: str
    fails_run: bool  # health.on_failure=stop ends the run for this finding
    keys: tuple[str, ...]  # of `health`: the thresholds that decide about the finding
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """What one evaluation measured."""

    step: int
    tokens: int  # trained on so far
    texts: Sequence[str]  # samples, without their prompts
    heads: HeadStatistics  # (L, H), over the held-out probe
    update_ratios: Tensor | None  # (matrices,): norm of the last update over norm of the weights
    val: dict[str, dict[str, float]]  # source -> {"loss": nats per token, "tokens": how many were scored}


class Judgement(NamedTuple):
    figures: dict[str, float]  # for the run's records
    findings: dict[str, str]  # finding's name -> message with the figure, the threshold and the remedy


class Check(ABC):
    """One kind of check. Each evaluation's evidence is judged once."""

    FINDINGS: ClassVar[dict[str, Finding]]  # what the check may find, by name

    def __init__(self, run: RunConfig, history: StepHistory) -> None:
        self.run, self.config, self.history = run, run.health, history

    @abstractmethod
    def judge(self, evidence: Evidence) -> Judgement: ...

    def too_early(self, step: int) -> bool:
        """Whether the model cannot be expected yet to have learned how frequent each token is."""
        return step < self.run.optimizer.warmup_steps + self.config.unigram_steps


def optimizer_remedy(optimizer: OptimizerConfig) -> str:
    """The keys that make this optimizer's steps smaller or safer: those that are switched off, and half the learning rate."""
    rate = "matrix_learning_rate" if optimizer.kind == "muon" else "learning_rate"
    switched_off = [
        setting
        for setting, is_off in (
            ("optimizer.clip_norm=1", optimizer.clip_norm is None),
            ("optimizer.warmup_steps=100", optimizer.warmup_steps == 0),
            ("optimizer.weight_decay=0.1", optimizer.weight_decay == 0),
        )
        if is_off
    ]
    return "set " + ", ".join([*switched_off, f"optimizer.{rate}={getattr(optimizer, rate) / 2:g}"])
