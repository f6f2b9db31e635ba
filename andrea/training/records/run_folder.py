"""The run folder: how it is recognised, its name, its lock, `config.yaml`, and the records in it.

`metrics.jsonl`, `samples.jsonl` and `health.jsonl` hold one record of JSON a line; each evaluation adds an HTML page. On
resume, the lines after the checkpoint's step are removed.
"""

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from andrea.checkpoint import Checkpoint, checkpoints_of, step_name
from andrea.config import RunConfig, UserError, to_plain
from andrea.config.parse import plain_yaml
from andrea.config.schema import LARGEST_STEP
from andrea.runtime import files, torchrun
from andrea.runtime.system import flush_to_disk
from andrea.training.records import Logger

# ---------------------------------------------------------------------------------------------------------- its records
# Each record has its `step`.

LARGEST_FIGURE = 1e100  # larger ones are mistakes
TEXTS = {"samples.jsonl": ("prompt", "text")}  # the keys of a record that hold text, by the name of its file
SHOWN_NUMBERS = 5


@dataclass(frozen=True)
class RecordFile:
    """The content of a file of records. lines: the records as the file has them.

    damaged: the numbers, from 1, of the lines that hold no record. A torn last line, as a crash leaves it, is not counted.
    """

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    @property
    def complaint(self) -> str:
        """A line that counts and names the damaged lines; empty if there is none."""
        if not self.damaged:
            return ""
        numbers = ", ".join(map(str, self.damaged[:SHOWN_NUMBERS])) + ", …" * (len(self.damaged) > SHOWN_NUMBERS)
        counted = f"{len(self.damaged)} damaged line{'s' * (len(self.damaged) > 1)} (number {numbers})"
        return f"{self.path.name}: {counted} left out, {len(self.records)} records read"


def read_records(path: Path) -> RecordFile:
    """The records of a file, oldest first. Without a regular file there are none. Raises StorageFailed."""
    found = RecordFile(path)
    with files.reading(path):
        if not path.is_file():  # reading a pipe would wait for ever
            return found
        *lines, torn = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, torn], 1):
        record = record_in(line, path.name)
        if record is not None:
            found.records.append(record)
            found.lines.append(line)
        elif number <= len(lines) and line.strip():
            found.damaged.append(number)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first, without its damaged lines, which `read_records` counts. Raises StorageFailed."""
    return read_records(path).records


def record_in(line: bytes, file_name: str) -> dict[str, Any] | None:
    """The record that a line holds; None if it holds none: a mapping with a step, and with the texts of its file."""
    try:
        record = files.from_json(line.decode())
    except ValueError:
        return None
    has_step = isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] <= LARGEST_STEP
    has_texts = has_step and all(isinstance(record.get(key), str) for key in TEXTS.get(file_name, ()))
    return record if has_texts else None


def append_line(path: Path, record: dict[str, Any]) -> None:
    r"""Raises StorageFailed. A lone surrogate, which UTF-8 cannot encode, is escaped as in \udc80."""
    with files.storing(path), open(path, "a", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
        stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def is_number(value: Any) -> bool:
    """Whether the value is a finite number that can also be squared, drawn, and written in a table."""
    return type(value) in (int, float) and abs(value) <= LARGEST_FIGURE


def values_of(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if is_number(record.get(key))]


# --------------------------------------------------------------------------------------------------------- recognise it
# Only a folder that this program made may be written to.
#
# A run folder has a mark, `run.json`, with a random id. Each checkpoint of the run holds the same id, so a copy of a
# checkpoint in another folder is recognised as a copy.

MARK = "run.json"
CONFIG = "config.yaml"
LARGEST_CONFIG_BYTES = 1 << 18
RUN_ID = re.compile("[0-9a-f]{16}")


def run_folder_of(checkpoint: Checkpoint) -> Path | None:
    """The run folder that holds the checkpoint; None if the checkpoint is not in the folder of its run."""
    folder, real = checkpoint.path.parent.parent, checkpoint.path.resolve()
    if real.parent.name != "checkpoints" or real.name != step_name(checkpoint.step):
        return None
    if folder.resolve() != real.parent.parent:  # the path goes through a link, or is relative to the run folder
        folder = real.parent.parent
    found = run_id_of(folder)
    return folder if found is not None and found == checkpoint.state.get("run") else None


def mark(folder: Path, run_id: str | None, init_from: str | None = None, resume: Path | None = None) -> str:
    """The id of the run in `folder`. A folder without an id gets `run_id`, or a new id. Raises StorageFailed.

    init_from, resume: the checkpoint from which the run begins: from its weights, or going on from it in a folder of its
    own. The mark keeps it, because a command that resumes the run does not name it.
    """
    found = run_id_of(folder)
    if found is None:
        found = run_id or secrets.token_hex(8)
        named = {"init_from": init_from, "resume": resume}
        with files.storing(folder / MARK):
            about = {"run": found} | {key: str(path) for key, path in named.items() if path}
            files.replace_text(folder / MARK, json.dumps(about) + "\n")
    return found


def beginning_of(folder: Path) -> dict[str, str]:
    """The checkpoint from which the run in `folder` began, under the key that named it; empty for random weights."""
    about = mark_of(folder)
    return {key: about[key] for key in ("init_from", "resume") if isinstance(about.get(key), str)}


def mark_of(folder: Path) -> dict[str, Any]:
    """The content of the folder's mark; empty without a readable mark."""
    try:
        found = files.from_json(files.read_plain_file(folder / MARK, LARGEST_CONFIG_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def run_id_of(folder: Path) -> str | None:
    """The id in the folder's mark; None without a readable mark."""
    run_id = mark_of(folder).get("run")
    return run_id if isinstance(run_id, str) and RUN_ID.fullmatch(run_id) else None


def is_run_folder(folder: Path) -> bool:
    """Whether this program made the folder for a run, which may not have a checkpoint yet."""
    return run_id_of(folder) is not None


def is_free(folder: Path) -> bool:
    """Whether a new run may use `folder`: it does not exist, or holds only files of a run that was killed at its start.

    Raises OSError if the folder cannot be read.
    """
    if not os.path.lexists(folder):
        return True
    names = {name for name in os.listdir(folder) if not name.startswith(".writing-")}
    started = names <= {MARK, ".lock", "checkpoints"}
    return started and not ("checkpoints" in names and os.listdir(folder / "checkpoints"))


def config_of(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.yaml; empty if it is missing or cannot be read as a mapping."""
    try:
        return load_config(folder)
    except (OSError, ValueError):
        return {}


def load_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.yaml. Raises OSError, or ValueError if it is not the YAML that this program writes."""
    found = plain_yaml(files.read_plain_file(folder / CONFIG, LARGEST_CONFIG_BYTES).decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it is not a mapping")
    return found


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
        files.make_folder(path.parent)
        files.replace_text(path, page["html"])

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
        with files.storing(self.metrics):
            flush_to_disk(self.folder)
        for path in (self.metrics, self.samples, self.alerts):
            if path.exists():
                with files.storing(path):
                    flush_to_disk(path)

    def cut_after(self, step: int, say: Callable[[str], None] = print) -> None:
        """Remove the records after `step` and all `event` records, because the run continues from `step`.

        A file with damaged lines is first copied, and `say` gets a line that counts and names them. Raises StorageFailed.
        """
        for path in (self.metrics, self.samples, self.alerts):
            found = read_records(path)
            if found.damaged:
                aside = files.unused_path(path.with_name(f"aside-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
                with files.storing(aside):
                    files.replace_bytes(aside, path.read_bytes())
                say(f"{found.complaint}; the file as it was is kept in {aside}")
            lines = zip(found.records, found.lines, strict=True)
            kept = [line for record, line in lines if record["step"] <= step and "event" not in record]
            with files.storing(path):
                files.replace_bytes(path, b"".join(line + b"\n" for line in kept))


def new_run_folder(config: RunConfig, checkpoint: Checkpoint | None = None) -> Path:
    """The folder of a new run. Raises UserError if the folder holds another run, or files of other programs.

    checkpoint: of another run, from which the run goes on. With resume=auto, after a restart by torchrun, or from the same
    checkpoint as before, a run without a checkpoint of its own may start again in its folder.
    """
    began = torchrun.recorded_run_folder()
    if began and is_run_folder(began) and not checkpoints_of(began):
        return began
    name = config.name or f"{config.model.name}-{config.data.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.runs_dir) / name
    with files.reporting_unusable(folder):
        folder = folder if config.name else files.unused_path(folder)
        if is_free(folder):
            return folder
    killed_early = is_run_folder(folder) and not checkpoints_of(folder)
    key, source = ("resume", checkpoint.path) if checkpoint else ("init_from", config.init_from)
    is_same = source is not None and beginning_of(folder) == {key: str(source)}
    if killed_early and (config.resume == "auto" or torchrun.is_restart() or is_same):
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
        return new_run_folder(config, checkpoint), False
    return own, True


@contextlib.contextmanager
def run_folder_locked(folder: Path) -> Iterator[None]:
    """Make the folder, lock it for this process, and remove files that a crash left half-written. Raises UserError."""
    with contextlib.ExitStack() as held:
        try:
            with files.reporting_unusable(folder):
                files.make_folder(folder)
                check_no_links(folder)
                files.make_folder(folder / "checkpoints")
                held.enter_context(files.exclusive_lock(folder / LOCK))
        except files.Locked as holder:
            raise UserError(
                f"{folder} is in use by another process ({holder}); wait for it, or choose another name=…"
            ) from None
        for unfinished in (folder, *filter(Path.is_dir, folder.iterdir())):
            files.remove_unfinished(unfinished)
        yield


def check_no_links(folder: Path) -> None:
    """Raises UserError for a link, a pipe or a device: the run would write through it to a place outside its folder."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"{path} is a link or a device, and a run writes only into its own folder; remove it, or put the file or "
                f"folder itself in its place"
            )


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the resolved configuration, from which the run can be started again."""
    import yaml

    plain = with_texts(to_plain(config), str)  # the YAML writer accepts no subclass of str
    content = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    with files.storing(folder / "config.yaml"):
        files.replace_text(folder / "config.yaml", content)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with `change` applied to each text in it: in mappings, whose keys are texts too, and in lists."""
    if isinstance(value, dict):
        return {change(key): with_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_texts(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value
