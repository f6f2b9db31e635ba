"""The interface of everything that records a run's figures: the run folder, the console, Weights & Biases.

A record is one flat mapping of a step's figures. Every record has the keys step, tokens, flops and seconds, so that runs
of different sizes can be compared on any of these axes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import numpy as np

from andrea.config import UserError
from andrea.text.tokenizer import without_surrogates

AXES = ("tokens", "flops", "seconds")  # of every record, besides step


class Logger(ABC):
    """Receives a run's figures, sample texts, pages and health alerts. Each mapping has `step` and the AXES."""

    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """Record one step's figures, or the end of the run (a record with the key `event`)."""

    @abstractmethod
    def sample(self, sample: dict[str, Any]) -> None:
        """Record one text that the model wrote: `prompt` and `text`."""

    @abstractmethod
    def page(self, page: dict[str, Any]) -> None:
        """Record an HTML page: its `name` and its `html`."""

    @abstractmethod
    def alert(self, alert: dict[str, Any]) -> None:
        """Record that a health finding begins or ends: `finding` (its name), `begins` (bool) and `message`."""

    @abstractmethod
    def finish(self, exit_code: int) -> None:
        """Close this logger: the run is over and nothing else will be recorded."""


# ---------------------------------------------------------------------------------------------------------- tensorboard
# logger.tensorboard: the records as TensorBoard's event files, in the run folder; `tensorboard --logdir runs` shows them.


@final
class TensorBoard(Logger):
    """Writes figures as scalars, figures of single heads as histograms over the heads, and samples and findings as text."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """first_step: the step of the next record. TensorBoard ignores earlier processes' records from this step on."""
        silence_writing_thread()
        self.writer = summary_writer()(str(folder / "tensorboard"), purge_step=first_step or None)

    def record(self, record: dict[str, Any]) -> None:
        step = record["step"]
        for key, value in record.items():
            if isinstance(value, list):
                numbers = [number for row in value for number in row if number is not None]
                if numbers:
                    self.writer.add_histogram(key, np.array(numbers), step)
            elif isinstance(value, str):
                self.writer.add_text(key, without_surrogates(value), step)
            elif value is not None and key != "step":
                self.writer.add_scalar(key, value, step)

    def sample(self, sample: dict[str, Any]) -> None:
        text = without_surrogates(sample["prompt"] + sample["text"])
        indented = "".join(f"    {line}\n" for line in text.split("\n"))  # shown unchanged: TensorBoard reads Markdown
        self.writer.add_text("sample", indented, sample["step"])

    def page(self, page: dict[str, Any]) -> None:
        pass  # TensorBoard shows no HTML; the page is in the run folder

    def alert(self, alert: dict[str, Any]) -> None:
        text = alert["message"] if alert["begins"] else f"ended: {alert['message']}"
        self.writer.add_text(f"health/{alert['finding']}", without_surrogates(text), alert["step"])

    def finish(self, exit_code: int) -> None:
        self.writer.close()


def summary_writer() -> type:
    """torch's writer of event files. Raises UserError if the package tensorboard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            'logger=tensorboard needs tensorboard; install it with: pip install -e ".[tensorboard]"'
        ) from None
    return SummaryWriter


def silence_writing_thread() -> None:
    """Let TensorBoard's thread end without a traceback if writing fails: its writer raises the error again when called."""
    usual = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            usual(failed)

    threading.excepthook = hook
