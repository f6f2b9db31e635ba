"""The progress of a run, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class FinishedRun(NamedTuple):
    """exit_code: see docs/runs.md. folder: the run's folder; None if only a plan was printed."""

    exit_code: int
    folder: Path | None


@dataclass
class Progress:
    """Counts and best results of a run. Each checkpoint's state.json saves every field under its own name."""

    step: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0  # of training steps; compiling, evaluating and saving are not counted
    val_loss: float | None = None  # nats per token, of the last evaluation
    val_bpb: float | None = None  # bits per byte, of the last evaluation
    val_tokens: int | None = None  # of the last evaluation, if it read only a part of the held-out text
    evaluated_step: int | None = None  # step of the last evaluation
    compared_bpb: float | None = None  # the same on the held-out tokens that every evaluation reads; None after a part
    best_bpb: float | None = None  # the lowest compared_bpb of a saved step
    evaluations_since_best: int = 0  # or since the learning rate began to fall because of train.patience
    planned_steps: int = 0  # length of the whole run, as planned now; set when a process starts
    follows_recipe: bool = True  # since its first step, from random weights: only such a run has an expected curve

    def axes(self) -> dict[str, float]:
        """The figures that every record carries, so that runs of different sizes can be compared on any of them."""
        return {"step": self.step, "tokens": self.tokens, "flops": self.flops, "seconds": self.seconds}
