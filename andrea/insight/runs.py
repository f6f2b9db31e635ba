"""The command `python -m andrea runs`: the runs of a folder, the newest first, as a table or in a narrow terminal as a list."""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from andrea.checkpoint import Damaged, checkpoints_of
from andrea.checkpoint.folder import model_name
from andrea.config import RunsConfig, UserError, nearest
from andrea.config.schema import NOT_RUNS
from andrea.insight.compare.comparison import NO_FIGURE, data_name, terminal_table
from andrea.insight.compare.runs import OF_RESULTS, curve, result_of, stored_numbers
from andrea.runtime.files import (
    UNFINISHED,
    Locked,
    StorageFailed,
    exclusive_lock,
    is_locked,
    replace_text,
    size_words,
    staging_path,
    storing,
)
from andrea.runtime.program import typed_command, typed_words
from andrea.runtime.streams import at_words, printable
from andrea.runtime.system import close_before_rename, rename
from andrea.training.records.console import format_number
from andrea.training.records.run_folder import (
    CONFIG,
    LOCK,
    MARK,
    beginning_of,
    config_of,
    is_number,
    is_run_folder,
    mark,
    mark_of,
    read_records,
)

# ---------------------------------------------------------------------------------------------------------- manage runs
# `andrea runs` with an action: what runs and prepared texts take on the disk, deleting a run, renaming a run.


def show_disk(config: RunsConfig, say: Callable[[str], None] = print) -> int:
    """Print the sizes of the runs, of what lies beside them, and of the prepared texts, the largest first."""
    runs_dir, total = Path(config.runs_dir), 0
    for folder in (runs_dir, Path(config.data_dir)):
        inside = list(folder.iterdir()) if folder.is_dir() else []
        sizes = sorted(((bytes_of(path), path) for path in inside), reverse=True)
        total += sum(size for size, _ in sizes)
        for size, path in sizes:
            n_saved = len(checkpoints_of(path))
            about = f"   {n_saved} checkpoint{'s' * (n_saved != 1)}" if n_saved else ""
            say(f"{size_words(size):>10}   {printable(str(path))}{about}")
    say(f"{size_words(total):>10}   in all; delete a run with `{typed_command('runs')} delete NAME`")
    say("a folder of a prepared text may be removed as well: a run that needs it prepares the text again")
    return 0


def bytes_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    files = [Path(place) / name for place, _, names in os.walk(path) for name in names]
    found = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile by a run that goes on
            found += file.lstat().st_size
    return found


def delete_run(config: RunsConfig, say: Callable[[str], None] = print) -> int:
    """Delete the run config.delete, if config.confirm says so. Returns the exit code. Raises UserError or StorageFailed."""
    folder = run_named(config.runs_dir, config.delete, "delete")
    with unused(folder) as lock:
        check_no_pupil(folder, config.runs_dir, "be deleted")
        n_saved, size = len(checkpoints_of(folder)), size_words(bytes_of(folder))
        if not config.confirm:
            words = typed_words(runs_dir=config.runs_dir) + " " if config.runs_dir != "runs" else ""
            raise UserError(
                f"{folder} ({size}, {n_saved} checkpoint{'s' * (n_saved != 1)}) was not deleted, because it could not be "
                f"restored; to delete it, type: {typed_command('runs')} delete {folder.name} {words}confirm=true"
            )
        doomed = staging_path(folder)  # renamed first, so that no reader finds it half removed
        with storing(folder, of_run=False):
            close_before_rename(lock)
            rename(folder, doomed)
            shutil.rmtree(doomed)
    say(f"deleted: {folder} ({size})")
    return 0


def rename_run(config: RunsConfig, say: Callable[[str], None] = print) -> int:
    """Rename the run config.rename to config.to. Returns the exit code. Raises UserError or StorageFailed.

    The run's id, by which its checkpoints know their run, stays the same. run.json keeps the earlier name, because runs that
    began from this run name it so.
    """
    folder = run_named(config.runs_dir, config.rename, "rename")
    import yaml

    if config.to is None:
        raise UserError(f"rename={config.rename} needs the new name: {typed_command('runs')} rename {folder.name} NEW")
    new = folder.with_name(config.to)
    if os.path.lexists(new) or config.to in NOT_RUNS or config.to.startswith(UNFINISHED):
        raise UserError(f"to={config.to}: {new} exists, or is a folder of wandb or of a sweep; choose another name")
    with unused(folder) as lock:
        check_no_pupil(folder, config.runs_dir, "be renamed")
        settings, run_id = config_of(folder), mark(folder, None)
        about = mark_of(folder) | {"run": run_id, "earlier_names": [*earlier_names(folder), folder.name]}
        with storing(folder, of_run=False):
            replace_text(folder / MARK, json.dumps(about) + "\n")
            if settings:  # a file that cannot be read stays as it is
                text = yaml.safe_dump(settings | {"name": config.to}, sort_keys=False, allow_unicode=True)
                replace_text(folder / CONFIG, text)
            close_before_rename(lock)
            rename(folder, new)
        (new / LOCK).unlink(missing_ok=True)
    say(f"renamed: {folder} is now {new}; continue it with {typed_command('train')} {typed_words(resume=new)}")
    return 0


def run_named(runs_dir: str, name: Any, key: str) -> Path:
    """The folder of the run of this name. Raises UserError if there is none, or if it is not a run's folder."""
    folder = Path(runs_dir) / name
    if folder.is_symlink() or not folder.is_dir() or not is_run_folder(folder):
        names = [run.name for run in runs_in(Path(runs_dir))]
        raise UserError(f"{key}={name}: {folder} is not the folder of a run of this program{nearest(name, names)}")
    return folder


@contextlib.contextmanager
def unused(folder: Path) -> Iterator[TextIO]:
    """Hold the run's lock. Raises UserError if a process uses the run, or if the folder cannot be written."""
    try:
        with exclusive_lock(folder / LOCK) as lock:
            yield lock
    except Locked as holder:
        raise UserError(f"{folder} is in use by another process ({holder}); end it first") from None


def check_no_pupil(folder: Path, runs_dir: str, done: str) -> None:
    """Raises UserError if a run was trained with this one as its teacher: to resume, it needs the teacher at its place."""
    others = [run for run in runs_in(Path(runs_dir)) if run != folder]
    pupils = [run.name for run in others if any(folder.name in path.parts for path in teachers_of(config_of(run)))]
    if pupils:
        raise UserError(
            f"{folder} cannot {done}: it is a teacher (train.teachers) of {', '.join(pupils)}, which needs it there to be "
            f"resumed; delete {pupils[0]} first"
        )


def teachers_of(config: dict[str, Any]) -> list[Path]:
    teachers = inner(config, "train", "teachers")
    return [Path(path) for path in teachers if isinstance(path, str) and path] if isinstance(teachers, list) else []


# ------------------------------------------------------------------------------------------------------------- the list

HEADS = ["run", "model", "params", "step", "bits/byte", "state", "text", "parent", "last record"]
ANY_WIDTH = sys.maxsize  # of a line: a name stays whole, because other commands take it


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
    read: list[tuple[float, list[str]]] = []
    damaged = []
    for run in runs:
        try:
            metrics = read_records(run / "metrics.jsonl")
            read.append(read_row(run, metrics.records, renamed))
            damaged += [f"{run.name}: {metrics.complaint}"] if metrics.damaged else []
        except StorageFailed as error:
            damaged.append(f"{run.name}: left out, {error}")
    rows = [cells for _, cells in sorted(read, key=lambda each: each[0], reverse=True)]
    table = terminal_table(HEADS, rows, ANY_WIDTH)
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


def list_entry(cells: list[str]) -> list[str]:
    """The run's name, which stays whole, and its figures in short lines below."""
    name, model, parameters, step, bits_per_byte, state, text, parents, changed = map(printable, cells)
    began = f"  from {parents}" if parents != NO_FIGURE else ""
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


def read_row(folder: Path, records: list[dict[str, Any]], renamed: dict[str, str]) -> tuple[float, list[str]]:
    """Read a run folder, whatever state it is in. records: of its metrics.jsonl. Raises StorageFailed.

    renamed: earlier name of a run -> its name now. Returns the last record's time, in seconds since 1970, and the cells.
    """
    config, metrics = config_of(folder), folder / "metrics.jsonl"
    changed = (metrics if os.path.exists(metrics) else folder).stat().st_mtime
    model, steps = (inner(config, *keys) for keys in (("model", "name"), ("train", "steps")))
    parameters, bits_per_byte = parameters_of(folder), result_in(folder, records).get("val/bpb")
    parents = [renamed.get(name, name) for name in names_of_parents(folder, config)]
    return changed, [
        folder.name,
        model if isinstance(model, str) else NO_FIGURE,
        NO_FIGURE if parameters is None else format_number(parameters),
        f"{max((record['step'] for record in records), default=0)}/{steps if is_number(steps) else NO_FIGURE}",
        NO_FIGURE if bits_per_byte is None else f"{bits_per_byte:.4f}",
        state_of(folder, records),
        text_of(config),
        ", ".join(parents) or NO_FIGURE,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(changed)),
    ]


def result_in(folder: Path, records: list[dict[str, Any]]) -> dict[str, float]:
    """The evaluation of a run's result, with `val/bpb`; empty without an evaluation. Raises StorageFailed."""
    validation = curve(records, ("val/bpb",), OF_RESULTS)
    return result_of(validation, folder) if validation else {}


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
    """The runs from which it began (init_from, or resume in a folder of its own), or from whose predictions it learned
    (train.teachers), of which paths of checkpoints are known. config: the run's."""
    paths = [*map(Path, beginning_of(run).values()), *teachers_of(config)]
    return list(dict.fromkeys(map(model_name, paths)))  # the reference of an objective is also what the run began from


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
