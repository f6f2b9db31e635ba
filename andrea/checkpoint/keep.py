"""Decides which checkpoints of a run are kept: the newest ones and the best.

If a run goes back to an earlier step, its later checkpoints are set aside.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from andrea.checkpoint.find import best_of, checkpoints_of, step_of
from andrea.runtime.files import replace_text, staging_path, storing, unused_path


def mark_best(run: Path, name: str) -> None:
    """Note in the run's file `best` that the checkpoint of this name is the best so far. Raises StorageFailed."""
    path = run / "checkpoints" / "best"
    with storing(path):
        replace_text(path, name + "\n")


def keep_newest(run: Path, keep: int) -> None:
    """Remove all checkpoints except the newest `keep` and the best. Raises StorageFailed."""
    best = best_of(run)
    for path in checkpoints_of(run)[:-keep]:
        if path.name != best:
            doomed = staging_path(path)  # renamed first, so that no reader finds it half removed
            with storing(path):
                os.rename(path, doomed)
                shutil.rmtree(doomed)


def set_aside_after(run: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, because the run goes back to `step` and abandons its later part.

    Returns their new paths, which no reader of checkpoints finds. Raises StorageFailed.
    """
    aside, best = [], best_of(run)
    for path in checkpoints_of(run):
        if step_of(path) > step:
            aside.append(unused_path(path.with_name(f"aside-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}")))
            with storing(path):
                os.rename(path, aside[-1])
                if path.name == best:
                    (run / "checkpoints" / "best").unlink()
    return aside
