"""`andrea runs` with an action: what runs and prepared texts take on the disk, deleting a run, renaming a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from andrea.checkpoint import checkpoints_of
from andrea.config import RunsConfig, UserError, nearest
from andrea.insight.compare.runs import NOT_RUNS
from andrea.insight.runs import earlier_names, inner, runs_in
from andrea.runtime.files import UNFINISHED, Locked, exclusive_lock, replace_text, size_words, staging_path, storing
from andrea.runtime.program import typed_command, typed_words
from andrea.runtime.streams import printable
from andrea.training.records.recognise import CONFIG, MARK, config_of, is_run_folder, mark, mark_of
from andrea.training.records.run_folder import LOCK


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
    with unused(folder):
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
            os.rename(folder, doomed)
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
    with unused(folder):
        check_no_pupil(folder, config.runs_dir, "be renamed")
        settings, run_id = config_of(folder), mark(folder, None)
        about = mark_of(folder) | {"run": run_id, "earlier_names": [*earlier_names(folder), folder.name]}
        with storing(folder, of_run=False):
            replace_text(folder / MARK, json.dumps(about) + "\n")
            replace_text(
                folder / CONFIG, yaml.safe_dump(settings | {"name": config.to}, sort_keys=False, allow_unicode=True)
            )
            os.rename(folder, new)
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
def unused(folder: Path) -> Iterator[None]:
    """Hold the run's lock. Raises UserError if a process uses the run, or if the folder cannot be written."""
    try:
        with exclusive_lock(folder / LOCK):
            yield
    except Locked as holder:
        raise UserError(f"{folder} is in use by another process ({holder}); end it first") from None


def check_no_pupil(folder: Path, runs_dir: str, done: str) -> None:
    """Raises UserError if a run was trained with this one as its teacher: to resume, it needs the teacher at its place."""
    pupils = [run.name for run in runs_in(Path(runs_dir)) if run != folder and is_teacher(folder, config_of(run))]
    if pupils:
        raise UserError(
            f"{folder} cannot {done}: it is a teacher (train.teachers) of {', '.join(pupils)}, which needs it there to be "
            f"resumed; delete {pupils[0]} first"
        )


def is_teacher(folder: Path, config: dict[str, Any]) -> bool:
    teachers = inner(config, "train", "teachers")
    return isinstance(teachers, list) and any(folder.name in Path(str(path)).parts for path in teachers)
