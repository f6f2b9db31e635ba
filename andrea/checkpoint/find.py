"""Finds checkpoints: the newest or the best of a run, or the one that a user names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from andrea.checkpoint.errors import Damaged
from andrea.checkpoint.folder import Checkpoint, read_checkpoint
from andrea.checkpoint.state import STEP_NAME
from andrea.config import UserError, nearest
from andrea.config.limits import LONGEST_NAME_BYTES
from andrea.runtime.program import typed_command, typed_words


def checkpoints_of(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first; an empty list if the run's folder cannot be read."""
    folder = run / "checkpoints"
    if not os.path.isdir(folder):  # also False without permission to read `run`
        return []
    return sorted(path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and path.is_dir())


def newest_whole(run: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint of a run that passes verification. `report` gets a line for each newer one that fails."""
    for path in reversed(checkpoints_of(run)):
        try:
            return read_checkpoint(path)
        except Damaged as fault:
            report(f"skipped: {fault}")
    return None


def result_of(run: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The checkpoint that is a run's result: the one with the best evaluation, or the newest while validation still improves.

    The newest checkpoint is the result if the last evaluation before it was the best so far. `report` gets a line if
    another checkpoint is the result, and for each damaged checkpoint.
    """
    newest = newest_whole(run, report)
    if newest is None or (best := result_path(newest.path, newest.state)) == newest.path:
        return newest
    try:
        found = read_checkpoint(best)
    except Damaged as fault:
        report(f"skipped: {fault}")
        return newest
    report(
        f"{run}: step {found.step} had the best evaluation, so it is used instead of the newest step, {newest.step}; "
        f"to use the newest, name {newest.path}"
    )
    return found


def result_path(newest: Path, state: dict[str, Any]) -> Path:
    """The checkpoint that is a run's result, found from its newest one, whose state.json has the content `state`."""
    best = best_of(newest.parents[1])
    return newest if best is None or is_best_so_far(state) else newest.with_name(best)


def is_best_so_far(state: dict[str, Any], slack: float = 0.0) -> bool:
    """Whether the last evaluation is the best of all saved steps, or worse than the best by at most the share `slack`.

    state: the content of state.json.
    """
    last, best = state.get("compared_bpb", state.get("val_bpb")), state.get("best_bpb")  # old versions: no compared_bpb
    return last is None or best is None or last <= (1 + slack) * best


def best_of(run: Path) -> str | None:
    """The name of the checkpoint with the lowest validation bits per byte, from the file `best`; None without it."""
    return named_in(run / "checkpoints" / "best")


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def named_in(path: Path) -> str | None:
    """The name of a checkpoint, read from the file `best`."""
    name = path.read_bytes()[:LONGEST_NAME_BYTES].decode("ascii", "replace").strip() if os.path.isfile(path) else ""
    return name if STEP_NAME.fullmatch(name) else None


def runs_of(runs_dir: Path) -> list[Path]:
    """The run folders with checkpoints, in no particular order."""
    return [path for path in Path(runs_dir).glob("*") if checkpoints_of(path)] if os.path.isdir(runs_dir) else []


def newest_run(runs_dir: Path) -> Path | None:
    """The run whose newest checkpoint was written last, or None if no run has a checkpoint."""
    return max(runs_of(runs_dir), key=lambda run: (checkpoints_of(run)[-1].stat().st_mtime_ns, run.name), default=None)


def folder_named_by(path: Path) -> Path | None:
    """The folder that `path` means; None if there is none.

    A folder means itself, `…/checkpoints` the run folder, and a file `best` the checkpoint that it names.
    """
    if os.path.isdir(path):
        return path.parent if path.name == "checkpoints" and checkpoints_of(path.parent) else path
    best = named_in(path) if path.name == "best" and os.path.isfile(path) else None
    return path.parent / best if best else None


def locate(
    requested: str | None,
    runs_dir: Path,
    key: str = "checkpoint",
    report: Callable[[str], None] = print,
    newest: bool = False,
) -> Checkpoint:
    """The checkpoint that a user requests by a checkpoint folder, a run folder, a run's name, or `…/checkpoints/best`.

    For a run, the result is returned (see `result_of`), or with `newest` the newest complete checkpoint, from which the
    run continues. If `requested` is None, the newest run under `runs_dir` is used.
    Raises UserError or Damaged. The message of a UserError names `key`, the configuration key to change.
    """
    if not requested:
        run = newest_run(runs_dir)
        if run is None:
            raise UserError(
                f"no checkpoint under runs_dir={runs_dir}; train one with `{typed_command('train')} "
                f"{typed_words(runs_dir=runs_dir)}`, or name one with {key}=…"
            )
    else:
        run = next(filter(None, map(folder_named_by, (Path(requested).expanduser(), Path(runs_dir) / requested))), None)
        if run is None:
            names = [path.name for path in runs_of(runs_dir)]
            raise UserError(
                f"{key}={requested} is neither a folder nor a run under runs_dir={runs_dir}{nearest(requested, names)}"
            )
        if not checkpoints_of(run) and not os.path.isdir(run / "checkpoints"):
            return read_checkpoint(run)
    found = newest_whole(run, report) if newest else result_of(run, report)
    if found is None:
        raise UserError(f"{run} has no complete checkpoint; name another run or checkpoint with {key}=…")
    return found
