"""Keeps the loss and gradient norm of recent training steps for the health checks.

The trainer has already read both numbers from the device, so keeping them delays no step.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any, final

from andrea.config import RunConfig

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
