"""The command `python -m andrea runs`: a table of the runs of a folder, the newest first."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.checkpoint import Damaged, checkpoints_of
from andrea.config import RunsConfig, UserError
from andrea.insight.compare.runs import NOT_RUNS, result_of, stored_numbers
from andrea.insight.compare.table import NO_FIGURE, terminal_table
from andrea.runtime.files import StorageFailed, is_locked
from andrea.runtime.program import typed_command, typed_words
from andrea.runtime.streams import printable
from andrea.training.records.format import format_number
from andrea.training.records.recognise import config_of, is_run_folder
from andrea.training.records.record_file import is_number, read_records
from andrea.training.records.run_folder import LOCK

HEADS = ["run", "model", "params", "step", "bits/byte", "state", "last record"]
ANY_WIDTH = sys.maxsize  # of the terminal: a name stays whole, because other commands take it


@dataclass(frozen=True)
class RunRow:
    """One run of the table. step: the last record's step. bits_per_byte: the figure of the run's result.

    changed: the last record's time, in seconds since 1970.
    """

    name: str
    model: str
    parameters: int | None
    step: int
    steps: int | None
    bits_per_byte: float | None
    state: str
    changed: float

    def cells(self) -> list[str]:
        return [
            self.name,
            self.model,
            NO_FIGURE if self.parameters is None else format_number(self.parameters),
            f"{self.step}/{NO_FIGURE if self.steps is None else self.steps}",
            NO_FIGURE if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}",
            self.state,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed)),
        ]


def show_runs(config: RunsConfig, say: Callable[[str], None] = print) -> int:
    """Print the table; `say` takes each line. Returns the exit code. Raises UserError if the folder holds no run."""
    folder, train = Path(config.runs_dir), f"{typed_command('train')} {typed_words(runs_dir=config.runs_dir)}"
    if not folder.is_dir():
        raise UserError(f"runs_dir={folder} is not a folder; train a run with `{train}` first")
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in NOT_RUNS)
    runs = [path for path in inside if is_run_folder(path)]
    others = [path.name for path in inside if path not in runs]
    if not runs:
        raise UserError(f"runs_dir={folder} holds no run; train one with `{train}`")
    rows, damaged = [], []
    for run in runs:
        try:
            metrics = read_records(run / "metrics.jsonl")
            rows.append(read_row(run, metrics.records))
            damaged += [f"{run.name}: {metrics.complaint}"] if metrics.damaged else []
        except StorageFailed as error:
            damaged.append(f"{run.name}: left out, {error}")
    rows.sort(key=lambda row: row.changed, reverse=True)
    say(terminal_table(HEADS, [row.cells() for row in rows], ANY_WIDTH))
    if others:
        say(f"left out, because they are not runs: {printable(', '.join(others))}")
    for line in damaged:
        say(printable(line))
    return 0


def read_row(folder: Path, records: list[dict[str, Any]]) -> RunRow:
    """Read a run folder, whatever state it is in. records: of its metrics.jsonl. Raises StorageFailed."""
    config, metrics = config_of(folder), folder / "metrics.jsonl"
    model, steps = (inner(config, *keys) for keys in (("model", "name"), ("train", "steps")))
    measured = [record for record in records if is_number(record.get("val/bpb"))]
    measured = [record for record in measured if "event" not in record] or measured
    return RunRow(
        folder.name,
        model if isinstance(model, str) else NO_FIGURE,
        parameters_of(folder),
        max((record["step"] for record in records), default=0),
        steps if is_number(steps) else None,
        result_of(measured, config)["val/bpb"] if measured else None,
        state_of(folder, records),
        (metrics if os.path.exists(metrics) else folder).stat().st_mtime,
    )


def state_of(folder: Path, records: list[dict[str, Any]]) -> str:
    """running, done, interrupted, stopped (by time or patience), failed (by health), or crashed: no end recorded, or not finite."""
    if is_locked(folder / LOCK):
        return "running"
    event = records[-1].get("event") if records else None
    return event if isinstance(event, str) else "crashed"


def inner(config: dict[str, Any], group: str, key: str) -> Any:
    found = config.get(group)
    return found.get(key) if isinstance(found, dict) else None


def parameters_of(folder: Path) -> int | None:
    """The number of parameters, from the header of the newest checkpoint; None if no checkpoint can be read."""
    for path in reversed(checkpoints_of(folder)):
        try:
            return stored_numbers(path)
        except (OSError, Damaged):
            continue
    return None
