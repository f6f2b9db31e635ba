"""Finds checkpoints: the newest or the best of a run, or the one that a user names; decides which of a run are kept."""

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from andrea.checkpoint.folder import Checkpoint, read_checkpoint, read_state
from andrea.checkpoint.state import STEP_NAME
from andrea.checkpoint.tensors import Damaged
from andrea.config import UserError, nearest
from andrea.runtime.files import UNFINISHED, StorageFailed, reading, replace_text, staging_path, storing, unused_path
from andrea.runtime.program import typed_command, typed_words
from andrea.runtime.system import WINDOWS, flush_to_disk, rename


def checkpoints_of(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first; none without a folder `checkpoints`.

    Raises StorageFailed if that folder cannot be listed: a run that seems to have no checkpoint would be begun anew.
    """
    folder = run / "checkpoints"
    with reading(folder), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(folder / each.name for each in entries if STEP_NAME.fullmatch(each.name) and each.is_dir())
    return []


def newest_whole(run: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint of a run that passes verification. `report` gets a line for each newer one that fails."""
    return newest_of(checkpoints_of(run), lambda fault: report(f"skipped: {fault}"))


def newest_of(checkpoints: list[Path], skip: Callable[[Damaged], None]) -> Checkpoint | None:
    """The newest of these checkpoints, oldest first, that passes verification. `skip` gets the fault of each newer one."""
    for path in reversed(checkpoints):
        try:
            return read_checkpoint(path)
        except Damaged as fault:
            skip(fault)
    return None


def result_of(run: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The checkpoint that is a run's result: the one with the best evaluation, or the newest while validation still improves.

    `report` gets a line if another than the newest is the result, and for each damaged one. Raises StorageFailed if a
    checkpoint that may be the result cannot be read now: another model is not what was asked for.
    """

    def skip(fault: Damaged) -> None:
        refuse_unreadable(fault)
        report(f"skipped: {fault}")

    newest = newest_of(checkpoints_of(run), skip)
    if newest is None or (best := result_path(newest.path, newest.state, skip)) == newest.path:
        return newest
    found = newest_of([best], skip)
    if found is None:
        return newest
    report(f"{run}: step {found.step} had the best evaluation and is used; to use the newest, name {newest.path}")
    return found


def refuse_unreadable(fault: Damaged) -> None:
    """Raises StorageFailed for a checkpoint that only cannot be read now."""
    if fault.may_be_whole:
        raise StorageFailed(str(fault), "try again, or name another checkpoint of the run") from fault


def result_path(newest: Path, state: dict[str, Any], skip: Callable[[Damaged], None] | None = None) -> Path:
    """A run's result, from its newest checkpoint and the content `state` of its state.json. skip: gets faults of older ones."""
    if is_best_so_far(state):
        return newest
    figures = figures_of([path for path in checkpoints_of(newest.parents[1]) if path < newest], skip)
    best = lowest(figures)
    return newest if best is None or figures[best] is None else newest.with_name(best)


def is_best_so_far(state: dict[str, Any], slack: float = 0.0) -> bool:
    """Whether state.json's last evaluation is the best of all saved steps, or worse by at most the share `slack` of it.

    With objective=grpo the figure is 1 - reward, which may be negative.
    """
    last, best = state.get("compared_bpb"), state.get("best_bpb")
    return last is None or best is None or last <= best + slack * abs(best)


def own_figure(state: dict[str, Any]) -> float | None:
    """The validation figure of state.json's own step, in bits per byte; None if that step was not evaluated."""
    figure, is_evaluated = state.get("compared_bpb"), state.get("evaluated_step") == state["step"]
    return figure if is_evaluated and figure is not None and math.isfinite(figure) else None


def figures_of(checkpoints: list[Path], skip: Callable[[Damaged], None] | None = None) -> dict[str, float | None]:
    """`own_figure` of each checkpoint whose state.json can be read, by name. `skip` gets the fault of each other one."""
    figures = {}
    for path in checkpoints:
        try:
            figures[path.name] = own_figure(read_state(path))
        except Damaged as fault:
            if skip:
                skip(fault)
    return figures


def lowest(figures: dict[str, float | None]) -> str | None:
    """The name with the lowest figure, of equal ones the oldest; without any figure the oldest name."""
    return min(figures, key=lambda name: math.inf if figures[name] is None else figures[name], default=None)


def best_of(run: Path, skip: Callable[[Damaged], None] | None = None) -> str | None:
    """The name of the checkpoint with the lowest validation bits per byte, as the checkpoints on the disk say."""
    return lowest(figures_of(checkpoints_of(run), skip))


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def runs_of(runs_dir: Path) -> dict[Path, Path]:
    """The newest checkpoint of each run folder; those that cannot be read or are half deleted are passed over."""
    found = {}
    for run in Path(runs_dir).glob("*") if os.path.isdir(runs_dir) else ():
        if run.name.startswith(UNFINISHED):
            continue
        with suppress(StorageFailed, IndexError):
            found[run] = checkpoints_of(run)[-1]
    return found


def newest_run(runs_dir: Path) -> Path | None:
    """The run whose newest checkpoint was written last, or None if no run has a checkpoint."""
    dated = []
    for run, newest in runs_of(runs_dir).items():
        with suppress(FileNotFoundError):  # removed meanwhile
            dated.append((newest.stat().st_mtime_ns, run.name, run))
    return max(dated)[-1] if dated else None


def folder_named_by(path: Path) -> Path | None:
    """The folder that `path` means: itself, of `…/checkpoints` the run, of `…/checkpoints/best` the best; None without one."""
    if os.path.isdir(path):
        return path.parent if path.name == "checkpoints" and checkpoints_of(path.parent) else path
    folder = path.absolute().parent
    best = best_of(folder.parent, refuse_unreadable) if (folder.name, path.name) == ("checkpoints", "best") else None
    return path.parent / best if best else None


def looks_written_by_a_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in ("checkpoints", "manifest.json"))


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
    Raises UserError, Damaged or StorageFailed. The message of a UserError names `key`, the configuration key to change.
    """
    if not requested:
        run = newest_run(runs_dir)
        if run is None:
            command = f"{typed_command('train')} {typed_words(runs_dir=runs_dir)}"
            raise UserError(
                f"no checkpoint under runs_dir={runs_dir}; train one with `{command}`, or name one with {key}=…"
            )
    else:
        places = map(folder_named_by, (Path(requested).expanduser(), Path(runs_dir) / requested))
        folders = [folder for folder in places if folder is not None]
        # A run may have the name of another folder here, such as that of its text.
        run = next(filter(looks_written_by_a_run, folders), folders[0] if folders else None)
        if run is None:
            hint = nearest(requested, [path.name for path in runs_of(runs_dir)])
            raise UserError(f"{key}={requested} is neither a folder nor a run under runs_dir={runs_dir}{hint}")
        if not checkpoints_of(run) and not os.path.isdir(run / "checkpoints"):
            return read_checkpoint(run)
    found = newest_whole(run, report) if newest else result_of(run, report)
    if found is None:
        raise UserError(f"{run} has no complete checkpoint; name another run or checkpoint with {key}=…")
    return found


# ------------------------------------------------------------------------------------------------ which are kept


def mark_and_prune(run: Path, keep: int, remembered: float | None = None) -> float | None:
    """Write the name of the best checkpoint to the file `best`, and remove all checkpoints except the newest `keep` and it.

    A checkpoint that cannot be read stays too: it may be the best. What is best follows from the checkpoints alone. The file
    `best`, for people, stays as it is while the checkpoint that it names may be the best and cannot be read. Returns the
    best checkpoint's figure, if it has one; or the lower figure `remembered` of the run's state, if the best one may be a
    checkpoint that cannot be read now. Raises StorageFailed.
    """
    unread: list[Damaged] = []
    figures = figures_of(checkpoints_of(run), unread.append)
    best = lowest(figures)
    found = None if best is None else figures[best]
    may_be_another = any(fault.may_be_whole for fault in unread)
    if remembered is not None and may_be_another:
        found = min(remembered, math.inf if found is None else found)
    if best is None:
        return found
    note = run / "checkpoints" / "best"
    with storing(note):
        noted = note.read_text(errors="replace").strip() if note.is_file() else ""
        if not (may_be_another and noted in [path.name for path in checkpoints_of(run)]):
            replace_text(note, best + "\n")
    for path in checkpoints_of(run)[:-keep]:
        if path.name in figures and path.name != best:
            doomed = staging_path(path)  # renamed first, so that no reader finds it half removed
            with storing(path):
                try:
                    rename(path, doomed)
                except PermissionError:
                    if not WINDOWS:
                        raise
                    continue  # another program reads it, such as `sample`; after a later save it can go
                flush_to_disk(path.parent)  # else power loss may bring the old name back, half removed
                shutil.rmtree(doomed)
    return found


def set_aside_after(run: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, to which the run goes back. Returns their new paths. Raises StorageFailed."""
    aside = []
    for path in checkpoints_of(run):
        if step_of(path) > step:
            aside.append(unused_path(path.with_name(f"aside-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}")))
            with storing(path):
                rename(path, aside[-1])
    return aside
