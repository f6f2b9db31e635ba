"""The run folder: its name, its lock, `config.yaml`, and the records in it.

The module `recognise` decides which folders are run folders of this program.

`metrics.jsonl`, `samples.jsonl` and `health.jsonl` hold one record of JSON a line; each evaluation adds an HTML page. On
resume, the lines after the checkpoint's step are removed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from andrea.checkpoint import Checkpoint, checkpoints_of
from andrea.checkpoint.find import set_aside_after
from andrea.config import RunConfig, UserError, to_plain
from andrea.runtime import torchrun
from andrea.runtime.files import (
    Locked,
    exclusive_lock,
    flush_to_disk,
    make_folder,
    remove_unfinished,
    replace_bytes,
    replace_text,
    storing,
    unused_path,
)
from andrea.training.records.console import Console
from andrea.training.records.logger import Logger
from andrea.training.records.recognise import is_free, is_run_folder, run_folder_of
from andrea.training.records.record_file import append_line, read_lines, read_records

# -------------------------------------------------------------------------------------------------------------- run log
# `run.log` in the run folder: the errors that did not end the run. Without such errors there is no file.


class RunLog:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.log"

    def write(self, text: str) -> None:
        """Append `text` with the date and time. If the disk is full, the text is lost, and the run goes on."""
        with suppress(OSError), open(self.path, "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


# ------------------------------------------------------------------------------------------------------- the run folder

LOCK = ".lock"  # held while a process writes to the folder


@final
class RunFolder(Logger):
    """Writes a run's records into its folder. Raises StorageFailed if writing fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.samples = folder / "samples.jsonl"
        self.alerts = folder / "health.jsonl"

    def record(self, record: dict[str, Any]) -> None:
        append_line(self.metrics, record)

    def sample(self, sample: dict[str, Any]) -> None:
        append_line(self.samples, sample)

    def has_sample(self, step: int) -> bool:
        return any(sample["step"] == step for sample in read_lines(self.samples))

    def page(self, page: dict[str, Any]) -> None:
        """Raises OSError if writing fails: unlike a record, a page is optional."""
        path = self.page_path(page["name"], page["step"])
        make_folder(path.parent)
        replace_text(path, page["html"])

    def page_path(self, name: str, step: int) -> Path:
        return self.folder / name / f"step-{step:08d}.html"

    def alert(self, alert: dict[str, Any]) -> None:
        append_line(self.alerts, alert)

    def finish(self, exit_code: int) -> None:
        self.flush()

    def flush(self) -> None:
        """Flush all records to the disk. Called before a checkpoint is written, so that earlier records are safe.

        Raises StorageFailed, also if the folder was removed: writing a checkpoint would make it again, without the records.
        """
        with storing(self.metrics):
            flush_to_disk(self.folder)
        for path in (self.metrics, self.samples, self.alerts):
            if path.exists():
                with storing(path):
                    flush_to_disk(path)

    def cut_after(self, step: int, say: Callable[[str], None] = print) -> None:
        """Remove the records after `step` and all `event` records, because the run continues from `step`.

        A file with damaged lines is first copied, and `say` gets a line that counts and names them. Raises StorageFailed.
        """
        for path in (self.metrics, self.samples, self.alerts):
            found = read_records(path)
            if found.damaged:
                aside = unused_path(path.with_name(f"aside-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
                with storing(aside):
                    replace_bytes(aside, path.read_bytes())
                say(f"{found.complaint}; the file as it was is kept in {aside}")
            lines = zip(found.records, found.lines, strict=True)
            kept = [line for record, line in lines if record["step"] <= step and "event" not in record]
            with storing(path):
                replace_bytes(path, b"".join(line + b"\n" for line in kept))


def new_run_folder(config: RunConfig) -> Path:
    """The folder of a new run. Raises UserError if the folder holds another run, or files of other programs.

    With resume=auto, or after a restart by torchrun, a run without a checkpoint may start again in its folder.
    """
    began = torchrun.recorded_run_folder()
    if began and is_run_folder(began) and not checkpoints_of(began):
        return began
    name = config.name or f"{config.model.name}-{config.data.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.runs_dir) / name
    with reporting_unusable(folder):
        folder = folder if config.name else unused_path(folder)
        if is_free(folder):
            return folder
    killed_early = is_run_folder(folder) and not checkpoints_of(folder)
    if killed_early and (config.resume == "auto" or torchrun.is_restart()):
        return folder
    if is_run_folder(folder):
        raise UserError(f"name={name}: {folder} exists; continue it with resume=auto, or choose another name")
    raise UserError(f"name={name}: {folder} exists and is not a run folder of this program; choose another name")


def folder_to_write(config: RunConfig, checkpoint: Checkpoint | None) -> tuple[Path, bool]:
    """The folder that the run writes to, and whether it holds the checkpoint from which the run is resumed.

    A checkpoint outside the folder of its run is a copy: the run continues in a new folder. With a name of its own, the
    run becomes another one, in the folder of this name. Raises UserError.
    """
    own = run_folder_of(checkpoint) if checkpoint else None
    named = Path(config.runs_dir) / config.name if config.name else own
    if own is None or named is None or named.resolve() != own.resolve():
        return new_run_folder(config), False
    return own, True


@contextlib.contextmanager
def reporting_unusable(folder: Path) -> Iterator[None]:
    """Context in which an OSError becomes a UserError that names runs_dir."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"runs_dir: {folder} cannot be written ({error.strerror}); set runs_dir=… to a writable folder"
        ) from None


@contextlib.contextmanager
def run_folder_locked(folder: Path) -> Iterator[None]:
    """Make the folder, lock it for this process, and remove files that a crash left half-written. Raises UserError."""
    with contextlib.ExitStack() as held:
        try:
            with reporting_unusable(folder):
                make_folder(folder)
                check_no_links(folder)
                make_folder(folder / "checkpoints")
                held.enter_context(exclusive_lock(folder / LOCK))
        except Locked as holder:
            raise UserError(
                f"{folder} is in use by another process ({holder}); wait for it, or choose another name=…"
            ) from None
        for unfinished in (folder, *filter(Path.is_dir, folder.iterdir())):
            remove_unfinished(unfinished)
        yield


def check_no_links(folder: Path) -> None:
    """Raises UserError if a file or folder in the run folder is a link, a pipe or a device.

    The run would write through a link to a place outside its folder. A run folder may come from somebody else.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"{path} is a link or a device, and a run writes only into its own folder; remove it, or put the file or "
                f"folder itself in its place"
            )


def set_later_checkpoints_aside(folder: Path, checkpoint: Checkpoint | None, console: Console) -> None:
    """Rename the checkpoints after the one from which the run continues. Raises StorageFailed."""
    for path in set_aside_after(folder, checkpoint.step) if checkpoint else []:
        console.say(f"the run continues from an earlier step; a checkpoint after that step was renamed to {path}")


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the resolved configuration, from which the run can be started again."""
    import yaml

    content = yaml.safe_dump(plain_text(to_plain(config)), sort_keys=False, allow_unicode=True)
    with storing(folder / "config.yaml"):
        replace_text(folder / "config.yaml", content)


def plain_text(value: Any) -> Any:
    """Convert subclasses of str to str, also in mappings and lists, because the YAML writer accepts only str."""
    if isinstance(value, dict):
        return {str(key): plain_text(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain_text(entry) for entry in value]
    return str(value) if isinstance(value, str) else value
