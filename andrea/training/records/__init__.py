"""Where a run's figures are recorded: the run folder, the console, Weights & Biases, TensorBoard.

A record is one flat mapping of a step's figures. Every record has the keys step, tokens, flops and seconds, so that runs
of different sizes can be compared on any of these axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

AXES = ("tokens", "flops", "seconds")  # of every record, besides step


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
