"""Shared parts of the health checks: the evidence that they judge, their judgement, and the remedy that they suggest.

L layers, H heads.
"""

from __future__ import annotations

import shlex
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import OptimizerConfig, RunConfig
from andrea.training.expected.curves import Standing

# -------------------------------------------------------------------------------------------------------------- history
# Keeps the loss and gradient norm of recent training steps for the health checks.
#
# The trainer has already read both numbers from the device, so keeping them delays no step.

RECENT_STEPS = 50  # losses and gradient norms of this many steps define the usual range
LATEST_STEPS = 10  # the median loss of this many steps is the current loss
FEWEST_STEPS = 20  # with fewer steps, the usual range is not known
LOSS_SPIKE = 8.0  # a step's training loss lies this many robust standard deviations above the median of the last steps
GRADIENT_SPIKE = 5.0  # a step's gradient norm is this many times the median of the last steps
MAD_TO_DEVIATION = 1.4826  # standard deviation / median absolute deviation of a normal distribution


@final
class StepHistory:
    """Losses and gradient norms of the last RECENT_STEPS steps, and the spikes since the last evaluation."""

    def __init__(self, run: RunConfig, unigram_nats: float) -> None:
        """unigram_nats: the entropy of single training tokens."""
        self.clip_norm, self.unigram_nats = run.optimizer.clip_norm, unigram_nats
        self.losses: deque[float] = deque(maxlen=RECENT_STEPS)  # nats per token, newest last
        self.norms: deque[float] = deque(maxlen=RECENT_STEPS)  # of the gradient before clipping, newest last
        self.interval = {"steps": 0, "loss_spikes": 0, "gradient_spikes": 0, "clipped": 0}  # since the last evaluation
        self.worst: dict[str, list[float]] = {}  # kind of spike -> [step, value, limit] of the highest since then
        self.learned = False  # whether the current loss has ever been below unigram_nats

    def note(self, step: int, loss: float, norm: float) -> None:
        """Note a step's training loss (nats per token) and gradient norm, both finite."""
        self.interval["steps"] += 1
        if len(self.losses) >= FEWEST_STEPS:
            middle = statistics.median(self.losses)
            deviation = MAD_TO_DEVIATION * statistics.median(abs(each - middle) for each in self.losses)
            self.note_spike("loss_spikes", step, loss, middle + LOSS_SPIKE * deviation)
            self.note_spike("gradient_spikes", step, norm, GRADIENT_SPIKE * statistics.median(self.norms))
        self.interval["clipped"] += int(self.clip_norm is not None and norm > self.clip_norm)
        self.losses.append(loss)
        self.norms.append(norm)
        if len(self.losses) >= LATEST_STEPS and self.current_loss() < self.unigram_nats:
            self.learned = True

    def note_spike(self, kind: str, step: int, value: float, limit: float) -> None:
        if value > limit > 0:
            self.interval[kind] += 1
            if kind not in self.worst or value > self.worst[kind][1]:
                self.worst[kind] = [step, value, limit]

    def current_loss(self) -> float:
        """The median training loss of the last LATEST_STEPS steps, nats per token."""
        return statistics.median(list(self.losses)[-LATEST_STEPS:])

    def begin_interval(self) -> None:
        """Reset the counts of spikes and clipped steps, after an evaluation has judged them."""
        self.interval = dict.fromkeys(self.interval, 0)
        self.worst = {}

    def state(self) -> dict[str, Any]:
        """The state that checkpoints save. Its keys are part of the checkpoint format."""
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "interval": self.interval,
            "worst": self.worst,
            "learned": self.learned,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
        self.interval, self.worst, self.learned = state["interval"], state["worst"], state["learned"]


# --------------------------------------------------------------------------------------------------------------- checks

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
