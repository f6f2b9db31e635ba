"""Where a run's figures are recorded: the run folder, the console, Weights & Biases, TensorBoard.

A record is one flat mapping of a step's figures. Every record has the keys step, tokens, flops and seconds, so that runs
of different sizes can be compared on any of these axes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

AXES = ("tokens", "flops", "seconds")  # of every record, besides step


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


class Logger(ABC):
    """Receives a run's figures, sample texts, pages and health alerts. Each mapping has `step` and the AXES."""

    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """Record one step's figures, or the end of the run (a record with the key `event`)."""

    @abstractmethod
    def sample(self, sample: dict[str, Any]) -> None:
        """Record one text that the model wrote: `prompt` and `text`."""

    def page(self, page: dict[str, Any]) -> None:  # noqa: B027 (nothing to do where no pages are shown)
        """Record an HTML page: its `name` and its `html`."""

    @abstractmethod
    def alert(self, alert: dict[str, Any]) -> None:
        """Record that a health finding begins or ends: `finding` (its name), `begins` (bool) and `message`."""

    @abstractmethod
    def finish(self, exit_code: int) -> None:
        """Close this logger: the run is over and nothing else will be recorded."""
