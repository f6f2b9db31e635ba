"""Training from Python: the same run as with `train.py`, inside the caller's process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from andrea.api.command_line import SWITCHES
from andrea.api.loaded_model import LoadedModel, load
from andrea.api.run import train_one
from andrea.checkpoint import checkpoints_of, result_path, step_of
from andrea.checkpoint.folder import read_small_json
from andrea.config import UserError
from andrea.runtime.device import determinism_restored, return_freed_memory
from andrea.runtime.streams import unfailing_output
from andrea.training.records.run_folder import read_lines


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended. folder: the run folder; None after dry_run=true.

    exit_code: 0 if the run is done, else why it stopped (3: not finite, 4: health, 129, 130 or 143: interrupted), see docs/runs.md.
    figures: each figure of metrics.jsonl, such as "val/bpb" and "train/loss", at the run's result, which is its best
    evaluation; `step` and `checkpoint` are those of the result. A figure that was first recorded later has its last value.
    """

    folder: Path | None
    exit_code: int
    figures: dict[str, Any]

    def load(self, **keywords: Any) -> LoadedModel:
        """The model of the run's checkpoint with the best evaluation; keywords as for `andrea.load`. Raises UserError."""
        if self.folder is None:
            raise UserError("dry_run=true trained no model that could be loaded; leave out dry_run")
        return load(self.folder, **keywords)


def train(*words: str) -> TrainedRun:
    """Train a model, as `python train.py WORDS…` does: train("model=andrea-nano", "train.steps=200").

    An interrupted or stopped run is saved as the command would save it; the exit code gives the reason. Afterwards the
    settings of torch and of the process are restored. Raises UserError.
    """
    if switches := set(SWITCHES) & set(words):
        raise UserError(f"{min(switches)} is not supported here; call train in a loop, or use train.py")
    with process_settings_restored(), unfailing_output():
        finished = train_one(list(words))
    return TrainedRun(finished.folder, finished.exit_code, result_figures(finished.folder) if finished.folder else {})


def result_figures(run: Path) -> dict[str, Any]:
    """The figures of the run's result, and the last value of those that were recorded only after it."""
    figures: dict[str, Any] = {}
    records, saved = read_lines(run / "metrics.jsonl"), checkpoints_of(run)
    result = result_path(saved[-1], read_small_json(saved[-1] / "state.json")) if saved else None
    for of_result in (False, True):  # what was recorded up to the result replaces what was recorded after it
        for record in records:
            if of_result == (result is None or record["step"] <= step_of(result)):
                figures |= record
    return figures | ({"checkpoint": str(result)} if result else {})


@contextmanager
def process_settings_restored() -> Iterator[None]:
    """Restores process-wide settings that training changes: threads, determinism, random state, gradients, malloc."""
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    random = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
    try:
        with determinism_restored(), random, torch.enable_grad():
            yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_num_threads(threads)
        return_freed_memory()
