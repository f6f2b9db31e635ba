"""The command `python -m andrea runs`: the runs of a folder, the newest first, as a table or in a narrow terminal as a list."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.checkpoint import Damaged, checkpoints_of
from andrea.config import RunsConfig, UserError
from andrea.insight.compare.differences import data_name
from andrea.insight.compare.runs import NOT_RUNS, result_of, stored_numbers
from andrea.insight.compare.table import NO_FIGURE, terminal_table
from andrea.runtime.files import UNFINISHED, StorageFailed, is_locked
from andrea.runtime.program import typed_command, typed_words
from andrea.runtime.streams import at_words, printable
from andrea.training.records.format import format_number
from andrea.training.records.recognise import config_of, is_run_folder, mark_of
from andrea.training.records.record_file import is_number, read_records
from andrea.training.records.run_folder import LOCK

HEADS = ["run", "model", "params", "step", "bits/byte", "state", "text", "parent", "last record"]
ANY_WIDTH = sys.maxsize  # of a line: a name stays whole, because other commands take it


@dataclass(frozen=True)
class RunRow:
    """One run of the table. step: the last record's step. bits_per_byte: the figure of the run's result.

    parents: the runs from whose weights it began (init_from), or from whose predictions it learned (train.teachers).
    changed: the last record's time, in seconds since 1970.
    """

    name: str
    model: str
    parameters: int | None
    step: int
    steps: int | None
    bits_per_byte: float | None
    state: str
    text: str
    parents: list[str]
    changed: float

    def cells(self) -> list[str]:
        return [
            self.name,
            self.model,
            NO_FIGURE if self.parameters is None else format_number(self.parameters),
            f"{self.step}/{NO_FIGURE if self.steps is None else self.steps}",
            NO_FIGURE if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}",
            self.state,
            self.text,
            ", ".join(self.parents) or NO_FIGURE,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed)),
        ]


def show_runs(config: RunsConfig, say: Callable[[str], None] = print) -> int:
    """Print the table; `say` takes each line. Returns the exit code. Raises UserError if the folder holds no run."""
    folder, train = Path(config.runs_dir), f"{typed_command('train')} {typed_words(runs_dir=config.runs_dir)}"
    if not folder.is_dir():
        raise UserError(f"runs_dir={folder} is not a folder; train a run with `{train}` first")
    runs = runs_in(folder)
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in NOT_RUNS)
    others = [path.name for path in inside if path not in runs]
    if not runs:
        raise UserError(f"runs_dir={folder} holds no run; train one with `{train}`")
    renamed = {name: run.name for run in runs for name in earlier_names(run)}
    renamed |= {run.name: run.name for run in runs}  # a later run may have the earlier name of another
    rows, damaged = [], []
    for run in runs:
        try:
            metrics = read_records(run / "metrics.jsonl")
            rows.append(read_row(run, metrics.records, renamed))
            damaged += [f"{run.name}: {metrics.complaint}"] if metrics.damaged else []
        except StorageFailed as error:
            damaged.append(f"{run.name}: left out, {error}")
    rows.sort(key=lambda row: row.changed, reverse=True)
    table = terminal_table(HEADS, [row.cells() for row in rows], ANY_WIDTH)
    width = shutil.get_terminal_size((ANY_WIDTH, 24)).columns  # a pipe or a file gets the table
    say(
        table
        if max(map(len, table.split("\n"))) <= width
        else "\n".join(block for row in rows for block in list_entry(row))
    )
    if others:
        say(at_words(f"left out, because they are not runs: {printable(', '.join(others))}"))
    for line in damaged:
        say(at_words(printable(line)))
    say(at_words("`runs disk` shows sizes; `runs rename NAME NEW` and `runs delete NAME` change a run"))
    return 0


def list_entry(row: RunRow) -> list[str]:
    """The run's name, which stays whole, and its figures in short lines below."""
    name, model, parameters, step, bits_per_byte, state, text, parents, changed = map(printable, row.cells())
    began = f"  from {parents}" if row.parents else ""
    return [
        name,
        f"  {state} at step {step} · {bits_per_byte} bits/byte · {changed}",
        f"  {model}, {parameters} parameters · text {text}{began}",
    ]


def runs_in(folder: Path) -> list[Path]:
    """The run folders of this program directly in `folder`, by name; those that are being deleted are left out."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path
        for path in inside
        if path.name not in NOT_RUNS and not path.name.startswith(UNFINISHED) and path.is_dir() and is_run_folder(path)
    ]


def read_row(folder: Path, records: list[dict[str, Any]], renamed: dict[str, str]) -> RunRow:
    """Read a run folder, whatever state it is in. records: of its metrics.jsonl. Raises StorageFailed.

    renamed: earlier name of a run -> its name now.
    """
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
        text_of(config),
        [renamed.get(name, name) for name in names_of_parents(folder, config)],
        (metrics if os.path.exists(metrics) else folder).stat().st_mtime,
    )


def state_of(folder: Path, records: list[dict[str, Any]]) -> str:
    """running, done, interrupted, stopped (by time or patience), failed (by health), or crashed: no end recorded, or not finite."""
    if is_locked(folder / LOCK):
        return "running"
    event = records[-1].get("event") if records else None
    return event if isinstance(event, str) else "crashed"


def inner(config: dict[str, Any], *keys: str) -> Any:
    """The value of nested keys; None if a key is missing."""
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def text_of(config: dict[str, Any]) -> str:
    """The name of the run's text: of its file or folder, of the sources of a mixture, or else the kind of data."""
    if not isinstance(config.get("data"), dict):
        return NO_FIGURE
    path = inner(config, "data", "path")
    return Path(path).name or path if isinstance(path, str) and path else data_name(config)


def names_of_parents(run: Path, config: dict[str, Any]) -> list[str]:
    """The names of the runs of init_from and train.teachers, which hold paths of checkpoints. config: the run's."""
    teachers = inner(config, "train", "teachers")
    paths = [mark_of(run).get("init_from"), *(teachers if isinstance(teachers, list) else [])]
    named = [Path(path) for path in paths if isinstance(path, str) and path]
    return [path.parent.parent.name if path.parent.name == "checkpoints" else path.name for path in named]


def earlier_names(run: Path) -> list[str]:
    """The names that the run had before `runs rename`."""
    found = mark_of(run).get("earlier_names")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def parameters_of(folder: Path) -> int | None:
    """The number of parameters, from the header of the newest checkpoint; None if no checkpoint can be read."""
    for path in reversed(checkpoints_of(folder)):
        try:
            return stored_numbers(path)
        except (OSError, Damaged):
            continue
    return None
