"""Decides which checkpoints of a run are kept: the newest, and the best, which it marks."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

from andrea.checkpoint.find import checkpoints_of, figures_of, lowest, step_of
from andrea.checkpoint.tensors import Damaged
from andrea.runtime.files import replace_text, staging_path, storing, unused_path
from andrea.runtime.system import WINDOWS, flush_to_disk, rename


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
    """Rename the checkpoints after `step`, because the run goes back to `step` and abandons its later part.

    Returns their new paths, which no reader of checkpoints finds. Raises StorageFailed.
    """
    aside = []
    for path in checkpoints_of(run):
        if step_of(path) > step:
            aside.append(unused_path(path.with_name(f"aside-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}")))
            with storing(path):
                rename(path, aside[-1])
    return aside
