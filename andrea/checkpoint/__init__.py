"""The checkpoint folder: written whole or not at all, verified before it is believed, found again by name.

    runs/NAME/checkpoints/step-00000060/
        model.safetensors       weights, fp32 masters, under the model's own parameter names
        optimizer.safetensors   the optimizer's state, `parameter/quantity`
        state.json              step, tokens, random state, configuration, figures, tokenizer identity, format version
        tokenizer.json …        the tokenizer, so that text can be made without the data
        manifest.json           size and sha256 of each of the files above

Where every rank of a sharded run writes what it keeps, `shards/` stands in for the first two: safetensors files as
torch.distributed.checkpoint lays them out, weights and optimizer state in files of their own. `consolidate` makes the two
files of them.

A checkpoint is written beside its place in a folder whose name no reader looks at, flushed to the disk and renamed;
a crash leaves either the whole folder or none. No pickle is ever read or written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andrea.config import UserError, nearest
from andrea.runtime.files import (
    file_sha256,
    flush_to_disk,
    remove_unfinished,
    replace_text,
    replacing,
    staging_path,
    storing,
)
from andrea.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
LARGEST_JSON_BYTES = 1 << 26
# of state.json: what readers rely on
STATE_TYPES = {"step": (int,), "tokens": (int,), "config": (dict,), "val_bpb": (float, type(None))}
STEP_NAME = re.compile(r"step-\d{8,}")
SHARDS = "shards"
FILE_NAME = re.compile(rf"({SHARDS}/)?[A-Za-z0-9_][A-Za-z0-9._-]*")


class Damaged(UserError):
    """The folder is not a whole checkpoint of this project; the message names the folder and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder: `state` is read, tensors are read when asked for."""

    path: Path
    state: dict[str, Any]
    is_sharded: bool = False

    @property
    def step(self) -> int:
        return self.state["step"]

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Weights by parameter name, on the CPU."""
        if self.is_sharded:
            return _load_shards(self.path / SHARDS, lambda name: "/" not in name)
        return _load_tensors(self.path / "model.safetensors")

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state by `parameter/quantity`, on the CPU."""
        if self.is_sharded:
            return _load_shards(self.path / SHARDS, lambda name: "/" in name)
        if not (self.path / "optimizer.safetensors").exists():
            raise UserError(
                f"{self.path} holds weights only and cannot be resumed; start from them with init_from={self.path}"
            )
        return _load_tensors(self.path / "optimizer.safetensors")

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)


def write_checkpoint(
    checkpoints: Path,
    state: dict[str, Any],
    model_tensors: dict[str, torch.Tensor],
    optimizer_tensors: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
) -> Path:
    """Write `checkpoints/step-00000600` (its number is `state["step"]`) whole or not at all, and return its path.

    Raises StorageFailed when the disk refuses; what was there before is then still there.
    """
    final = checkpoints / step_name(state["step"])
    with storing(final):
        beside = folder_beside(checkpoints, state["step"])
    with storing(final), gone_unless_finished(beside):
        write_tensors(beside / "model.safetensors", model_tensors)
        write_tensors(beside / "optimizer.safetensors", optimizer_tensors)
        files = describe_files(beside, beside.glob("*.safetensors"))
    return finished_folder(checkpoints, beside, state, tokenizer, files)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def folder_beside(checkpoints: Path, step: int) -> Path:
    """A new folder that no reader looks at, for the files of a checkpoint. Raises StorageFailed."""
    remove_unfinished(checkpoints)
    beside = staging_path(checkpoints / step_name(step))
    with storing(beside):
        beside.mkdir(parents=True)
    return beside


def describe_files(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of files of the folder, by name, once they are on the disk."""
    described = {}
    for path in sorted(paths):
        described[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        flush_to_disk(path)
    return described


def finished_folder(
    checkpoints: Path, beside: Path, state: dict[str, Any], tokenizer: Tokenizer, tensors: dict[str, dict[str, Any]]
) -> Path:
    """Add to the files of tensors what makes them a checkpoint, and rename the folder into its place."""
    final = checkpoints / step_name(state["step"])
    with storing(final), gone_unless_finished(beside):
        tokenizer.save(beside)
        state = {"format_version": FORMAT_VERSION, **state, "tokenizer": tokenizer.identity}
        (beside / "state.json").write_text(json_text(state), encoding="utf-8")
        others = [path for path in beside.iterdir() if path.is_file() and path.name not in tensors]
        write_manifest(beside, tensors | describe_files(beside, others))
        for folder in (beside / SHARDS, beside):
            if folder.exists():
                flush_to_disk(folder)
        replaced = staging_path(final)  # of the same step: damaged, or gone back behind
        if final.exists():
            os.rename(final, replaced)
        os.rename(beside, final)
        flush_to_disk(checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def consolidate(path: Path) -> None:
    """Make `model.safetensors` and `optimizer.safetensors` of a sharded checkpoint's files, in place; others stay as they are.

    The new manifest, renamed into place, is what turns the one into the other: a crash leaves either, whole.
    """
    checkpoint = read_checkpoint(path)
    if not checkpoint.is_sharded:
        shutil.rmtree(path / SHARDS, ignore_errors=True)  # left by a crash right after
        return
    remove_unfinished(path)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    kept = {name: about for name, about in manifest["files"].items() if not name.startswith(f"{SHARDS}/")}
    with storing(path):
        for name, read in (
            ("optimizer.safetensors", checkpoint.optimizer_tensors),
            ("model.safetensors", checkpoint.model_tensors),
        ):
            with replacing(path / name) as staging:
                write_tensors(staging, read())
        write_manifest(path, kept | describe_files(path, path.glob("*.safetensors")))
        flush_to_disk(path)
        shutil.rmtree(path / SHARDS)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # which is how safetensors passes on that the disk refused
        raise OSError(str(error)) from error


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    replace_text(folder / "manifest.json", json_text({"format_version": FORMAT_VERSION, "files": files}))


@contextmanager
def gone_unless_finished(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify sizes and sha256 of every file and return the checkpoint. Raises Damaged, which names folder and fault."""
    path = Path(path)
    if not os.path.isdir(path):
        raise Damaged(f"{path} is not a checkpoint folder: no such folder")
    try:
        manifest, state = (read_small_json(path / name) for name in ("manifest.json", "state.json"))
        files = {str(name): expected for name, expected in dict(manifest["files"]).items()}
        version = int(manifest["format_version"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise Damaged(
            f"{path} is not a whole checkpoint of this project: manifest.json or state.json is missing or cannot be read; "
            f"name another with checkpoint=…"
        ) from None
    if version != FORMAT_VERSION:
        raise Damaged(f"{path} has format version {version}, this program reads {FORMAT_VERSION}")
    is_sharded = any(name.startswith(f"{SHARDS}/") for name in files)
    for name in ("state.json", "tokenizer.json", *([] if is_sharded else ["model.safetensors"])):
        if name not in files:
            raise Damaged(f"{path} is damaged: manifest.json does not list {name}")
    for name, expected in files.items():
        check_file(path, name, expected)
    if is_sharded and {f"{SHARDS}/{name}" for name in os.listdir(path / SHARDS)} - files.keys():
        raise Damaged(
            f"{path} is not a checkpoint of this project: {SHARDS}/ holds files that its manifest does not list"
        )
    for name in ("tokenizer.tiktoken", *(["optimizer.safetensors"] if "model.safetensors" in files else [])):
        if os.path.lexists(path / name) and name not in files:
            raise Damaged(f"{path} is damaged: it holds {name}, which manifest.json does not list")
    if not isinstance(state, dict) or not {"step", "config", "tokens"} <= state.keys():
        raise Damaged(f"{path} is damaged: state.json lacks step, tokens or config")
    for key, kinds in STATE_TYPES.items():
        if type(state.get(key)) not in kinds:
            raise Damaged(f"{path} is damaged: {key} in its state.json is {str(state.get(key))[:80]!r}")
    return Checkpoint(path, state, is_sharded)


def read_small_json(path: Path) -> Any:
    """Raises OSError, ValueError or RecursionError; reads neither links nor devices, which need have no end."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_JSON_BYTES:
        raise ValueError(f"{path} is no plain file of at most {LARGEST_JSON_BYTES} bytes")
    return json.loads(path.read_text(encoding="utf-8"))


def check_file(folder: Path, name: str, expected: Any) -> None:
    links = (folder / name).is_symlink() or (folder / name).parent.is_symlink()
    if not FILE_NAME.fullmatch(name) or links or not isinstance(expected, dict):
        raise Damaged(
            f"{folder} is not a checkpoint of this project: its manifest names {name!r}, which is not a plain file of it"
        )
    if not (folder / name).is_file():
        raise Damaged(f"{folder} is damaged: {name} is missing; use an older checkpoint")
    size = (folder / name).stat().st_size
    if size != expected.get("bytes"):
        raise Damaged(
            f"{folder} is damaged: {name} has {size} bytes instead of {expected.get('bytes')}; use an older checkpoint"
        )
    if file_sha256(folder / name) != expected.get("sha256"):
        raise Damaged(f"{folder} is damaged: the sha256 of {name} is not the one written; use an older checkpoint")


# ------------------------------------------------------------------------------------------------------- finding


def checkpoints_of(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    folder = run / "checkpoints"
    if not os.path.isdir(folder):  # which is False, too, where it is someone else's
        return []
    return sorted(path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and path.is_dir())


def newest_whole(run: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint of a run that verifies; damaged ones are reported and passed over."""
    for path in reversed(checkpoints_of(run)):
        try:
            return read_checkpoint(path)
        except Damaged as fault:
            report(f"passed over: {fault}")
    return None


def runs_of(runs_dir: Path) -> list[Path]:
    """The run folders that hold checkpoints, in no order."""
    return [path for path in Path(runs_dir).glob("*") if checkpoints_of(path)] if os.path.isdir(runs_dir) else []


def newest_run(runs_dir: Path) -> Path | None:
    """The run folder that was written to last: the newest checkpoint decides."""
    return max(runs_of(runs_dir), key=lambda run: (checkpoints_of(run)[-1].stat().st_mtime_ns, run.name), default=None)


def locate(
    asked: str | None, runs_dir: Path, key: str = "checkpoint", report: Callable[[str], None] = print
) -> Checkpoint:
    """The checkpoint a user means: a checkpoint folder, a run folder or a run's name; None is the newest run's newest.

    Raises UserError (or Damaged) naming `key` and what was looked for.
    """
    if not asked:
        run = newest_run(runs_dir)
        if run is None:
            raise UserError(
                f"no checkpoint under runs_dir={runs_dir}; train one with `python train.py`, or name one with {key}=…"
            )
    else:
        run = next((path for path in (Path(asked), Path(runs_dir) / asked) if os.path.isdir(path)), None)
        if run is None:
            names = [path.name for path in runs_of(runs_dir)]
            raise UserError(
                f"{key}={asked} is neither a folder nor a run under runs_dir={runs_dir}{nearest(asked, names)}"
            )
        if not checkpoints_of(run) and not os.path.isdir(run / "checkpoints"):
            return read_checkpoint(run)
    found = newest_whole(run, report)
    if found is None:
        raise UserError(f"{run} has no whole checkpoint; name another with {key}=…")
    return found


def best_of(run: Path) -> str | None:
    """The name of the checkpoint with the lowest validation figure, as the small file `best` says."""
    path = run / "checkpoints" / "best"
    name = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return name if STEP_NAME.fullmatch(name) else None


def keep_newest(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best."""
    best = best_of(run)
    for path in checkpoints_of(run)[:-keep]:
        if path.name != best:
            doomed = staging_path(path)  # out of every reader's sight first, in one move
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def set_aside_after(run: Path, step: int) -> list[Path]:
    """Checkpoints beyond a step that the run goes back to are of another future: renamed, so that no reader takes them."""
    aside, best = [], best_of(run)
    for path in checkpoints_of(run):
        if int(path.name.removeprefix("step-")) > step:
            aside.append(path.with_name(f"aside-{path.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
            with storing(path):
                os.rename(path, aside[-1])
                if path.name == best:
                    (run / "checkpoints" / "best").unlink()
    return aside


# --------------------------------------------------------------------------------------------------------- files


def json_text(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None
    for name, tensor in tensors.items():
        comparable = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isfinite of 8-bit floats
        if not bool(comparable.isfinite().all()):  # training never saves such numbers, and could not go on from them
            raise Damaged(f"{path} is damaged: {name} holds numbers that are not finite; use an older checkpoint")
    return tensors


def load_into(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors`, whole ones or the calling rank's parts (DTensors), from the checkpoint; every rank must call."""
    import torch.distributed.checkpoint as dcp

    folder = checkpoint.path / SHARDS if checkpoint.is_sharded else checkpoint.path
    with _believed(folder):
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def _load_shards(folder: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The whole tensors of a sharded checkpoint whose names are wanted."""
    import torch
    import torch.distributed.checkpoint as dcp

    with _believed(folder):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        tensors = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in reader.read_metadata().state_dict_metadata.items()
            if wanted(name)
        }
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


@contextmanager
def _believed(folder: Path) -> Iterator[None]:
    """Turns what torch's reader raises over files that are not what they say into Damaged."""
    import warnings

    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process reads alone is what is wanted
            yield
    except (SafetensorError, CheckpointException, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise Damaged(f"{folder} is damaged: {reason}") from None
