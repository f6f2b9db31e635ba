"""The checkpoint folder: written completely or not at all, and verified before its content is used.

    runs/NAME/checkpoints/step-00000060/
        model.safetensors       fp32 weights, under the model's parameter names
        optimizer.safetensors   the optimizer's state and the weights' running average, `parameter/quantity`
        state.json              step, tokens, random state, configuration, figures, tokenizer identity, format version
        tokenizer.json …        the tokenizer, so that text can be generated without the data
        manifest.json           size and sha256 of each of the files above

In a sharded run every rank writes its own rows. A folder `shards/` then replaces the first two files. It holds
safetensors files in the layout of torch.distributed.checkpoint, with weights and optimizer state in separate files.
`consolidate` turns the shards into the two files.

A checkpoint is written to a staging folder, flushed to the disk and renamed. A crash leaves a complete folder or none.
No pickle is ever read or written.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from torch import Tensor

from andrea.checkpoint.state import check_state
from andrea.checkpoint.tensors import Damaged, TensorReader, opening, write_tensors
from andrea.config import UserError
from andrea.runtime.files import (
    file_sha256,
    from_json,
    read_plain_file,
    remove_unfinished,
    replace_text,
    staging_path,
    storing,
)
from andrea.runtime.system import flush_to_disk, rename
from andrea.text.load_tokenizer import load_tokenizer
from andrea.text.tokenizer import Tokenizer

FORMAT_VERSION = 1
LARGEST_JSON_BYTES = 1 << 26
SHARDS = "shards"
AVERAGE = "average"  # the running average of a weight is saved as `parameter/average`
FILE_NAME = re.compile(rf"({SHARDS}/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
Files = dict[str, dict[str, Any]]  # path in the checkpoint -> {"bytes": size, "sha256": digest}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder. `state` is the content of state.json; the methods read the tensors."""

    path: Path
    state: dict[str, Any]
    is_sharded: bool = False

    @property
    def step(self) -> int:
        return self.state["step"]

    def model_tensors(self) -> dict[str, Tensor]:
        """Weights by parameter name, as training goes on from them, on the CPU. Raises Damaged."""
        reader = self.open_tensors(with_optimizer=False)
        return {name: reader.read(name) for name in reader.names if "/" not in name}

    def open_results(self) -> tuple[TensorReader, dict[str, str]]:
        """A reader, and the name under which the files hold the result of each weight: its running average, if the run kept
        one (`optimizer.average_half_life`), else the weight itself. Raises Damaged."""
        reader = self.open_tensors(with_optimizer=self.is_sharded or (self.path / "optimizer.safetensors").exists())
        names = {name: f"{name}/{AVERAGE}" for name in reader.names if "/" not in name}
        return reader, {name: average if average in reader.parts else name for name, average in names.items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Optimizer state by `parameter/quantity`, on the CPU. Raises Damaged, or UserError if it is missing."""
        reader = self.open_tensors()
        return {name: reader.read(name) for name in reader.names if "/" in name}

    def open_tensors(self, with_optimizer: bool = True) -> TensorReader:
        """A reader of weights and optimizer state. Raises Damaged, or UserError if the optimizer state is missing."""
        if self.is_sharded:
            return TensorReader(sorted((self.path / SHARDS).iterdir()))
        if not with_optimizer:
            return TensorReader([self.path / "model.safetensors"])
        if not (self.path / "optimizer.safetensors").exists():
            raise UserError(f"{self.path} holds weights only and cannot be resumed; use init_from={self.path}")
        return TensorReader([self.path / "model.safetensors", self.path / "optimizer.safetensors"])

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


# ------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    checkpoints: Path,
    state: dict[str, Any],
    model_tensors: dict[str, Tensor],
    optimizer_tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
) -> Path:
    """Write the checkpoint of step `state["step"]` whole, or raise StorageFailed and change nothing. Returns its path."""
    staging = make_staging_folder(checkpoints, state["step"])
    with storing(checkpoints / step_name(state["step"])), removed_on_failure(staging):
        write_tensors(staging / "model.safetensors", model_tensors)
        write_tensors(staging / "optimizer.safetensors", optimizer_tensors)
        files = flushed_files(staging, staging.glob("*.safetensors"))
    return publish(checkpoints, staging, state, tokenizer, files)


def write_weights(folder: Path, state: dict[str, Any], model_tensors: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a checkpoint folder without optimizer state, which cannot be resumed, whole or not at all. Raises StorageFailed."""
    staging = staging_path(folder)
    with storing(folder, of_run=False), removed_on_failure(staging):
        staging.mkdir(parents=True)
        write_tensors(staging / "model.safetensors", model_tensors)
        complete_files(staging, state, tokenizer, flushed_files(staging, staging.glob("*.safetensors")))
        rename(staging, folder)
        flush_to_disk(folder.parent)


def make_staging_folder(checkpoints: Path, step: int) -> Path:
    """A new folder, which no reader opens, for a checkpoint's files; those of crashed writers go. Raises StorageFailed."""
    remove_unfinished(checkpoints)
    staging = staging_path(checkpoints / step_name(step))
    with storing(checkpoints / step_name(step)):
        staging.mkdir(parents=True)
    return staging


def flushed_files(folder: Path, paths: Iterable[Path]) -> Files:
    """Flush the files and return their sizes and hashes. Raises OSError."""
    files = {}
    for path in sorted(paths):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        flush_to_disk(path)
    return files


def publish(checkpoints: Path, staging: Path, state: dict[str, Any], tokenizer: Tokenizer, tensor_files: Files) -> Path:
    """Complete a staging folder of flushed tensor files, and rename it; if that fails, remove it and raise StorageFailed."""
    final = checkpoints / step_name(state["step"])
    with storing(final), removed_on_failure(staging):
        complete_files(staging, state, tokenizer, tensor_files)
        replaced = staging_path(final)
        if final.exists():  # damaged, or written before the run went back to an earlier step
            rename(final, replaced)
        rename(staging, final)
        flush_to_disk(checkpoints)
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def complete_files(staging: Path, state: dict[str, Any], tokenizer: Tokenizer, tensor_files: Files) -> None:
    """Add the other files to a staging folder whose tensor files are already flushed. Raises OSError."""
    tokenizer.save(staging)
    state = {"format_version": FORMAT_VERSION, **state, "tokenizer": tokenizer.identity}
    (staging / "state.json").write_text(json_text(state), encoding="utf-8")
    other_files = [path for path in staging.iterdir() if path.is_file() and path.name not in tensor_files]
    write_manifest(staging, tensor_files | flushed_files(staging, other_files))
    for folder in (staging / SHARDS, staging):
        if folder.exists():
            flush_to_disk(folder)


def write_manifest(folder: Path, files: Files) -> None:
    """Write manifest.json atomically. Raises OSError."""
    replace_text(folder / "manifest.json", json_text({"format_version": FORMAT_VERSION, "files": files}))


def json_text(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# ------------------------------------------------------------------------------------------- reading and verifying


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify size and sha256 of every file and return the checkpoint. Raises Damaged, which names folder and fault."""
    path, is_folder = Path(path), False
    with opening(path), suppress(FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no name of a file
        is_folder = S_ISDIR(os.stat(path).st_mode)
    if not is_folder:
        raise Damaged(f"{path} is not a checkpoint folder: no such folder")
    with opening(path):
        try:
            manifest = read_small_json(path / "manifest.json")
            files = {str(name): expected for name, expected in dict(manifest["files"]).items()}
            version = int(manifest["format_version"])
        except (ValueError, KeyError, TypeError, OverflowError):
            raise Damaged(f"{path} is damaged: its manifest.json cannot be read; use an older checkpoint") from None
        if version != FORMAT_VERSION:
            raise Damaged(f"{path} has format version {version}, but this program reads only version {FORMAT_VERSION}")
        is_sharded = check_files(path, files)
        return Checkpoint(path, read_state(path), is_sharded)


def model_name(checkpoint: Path) -> str:
    """The name of the run that a checkpoint's folder belongs to; the folder's own name outside of a run."""
    return (checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint).name


def read_state(path: Path) -> dict[str, Any]:
    """The checked content of a checkpoint's state.json. No other file is read. Raises Damaged."""
    with opening(path):
        try:
            state = read_small_json(path / "state.json")
        except ValueError as error:
            raise Damaged(f"{path} is damaged: state.json cannot be read ({error!s:.100}); use an older one") from None
    check_state(path, state)
    return state


def read_small_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError or ValueError."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link")
    return from_json(read_plain_file(path, LARGEST_JSON_BYTES).decode("utf-8"))


def check_files(path: Path, files: dict[str, Any]) -> bool:
    """Compare the folder's files with the manifest's list. Returns whether the tensors are sharded. Raises Damaged."""
    is_sharded = any(name.startswith(f"{SHARDS}/") for name in files)
    for name in ("state.json", "tokenizer.json", *([] if is_sharded else ["model.safetensors"])):
        if name not in files:
            raise Damaged(f"{path} is damaged: manifest.json does not list {name}")
    for name, expected in files.items():
        check_file(path, name, expected)
    if is_sharded and {f"{SHARDS}/{name}" for name in os.listdir(path / SHARDS)} - files.keys():
        raise Damaged(f"{path} is damaged: {SHARDS}/ holds files that manifest.json does not list")
    for name in ("tokenizer.tiktoken", *(["optimizer.safetensors"] if "model.safetensors" in files else [])):
        if os.path.lexists(path / name) and name not in files:
            raise Damaged(f"{path} is damaged: it holds {name}, which manifest.json does not list")
    return is_sharded


def check_file(folder: Path, name: str, expected: Any) -> None:
    """Raises Damaged if the file is missing, is not a plain file in `folder`, or differs from the manifest's entry."""
    has_link = (folder / name).is_symlink() or (folder / name).parent.is_symlink()
    if not FILE_NAME.fullmatch(name) or has_link or not isinstance(expected, dict):
        raise Damaged(f"{folder} is damaged: its manifest names {name!r}, which is not a regular file in it")
    if not (folder / name).is_file():
        raise Damaged(f"{folder} is damaged: {name} is missing; use an older checkpoint")
    size = (folder / name).stat().st_size
    if size != expected.get("bytes"):
        raise Damaged(f"{folder} is damaged: {name} has {size} bytes, not {expected.get('bytes')}; use an older one")
    if file_sha256(folder / name) != expected.get("sha256"):
        raise Damaged(f"{folder} is damaged: {name} has another sha256 than in manifest.json; use an older checkpoint")


# ------------------------------------------------------------------------------------------------ from shards to files


def consolidate(path: Path) -> None:
    """Replace a checkpoint's shards by `model.safetensors` and `optimizer.safetensors`. Without shards, do nothing.

    The change takes effect when the new manifest is renamed: before it the shards are valid, after it the two files.
    The conversion needs memory for the larger of the two files. Raises Damaged and StorageFailed.
    """
    checkpoint = read_checkpoint(path)
    if not checkpoint.is_sharded:
        shutil.rmtree(path / SHARDS, ignore_errors=True)  # left by a crash after the new manifest
        return
    remove_unfinished(path)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    other_files = {name: about for name, about in manifest["files"].items() if not name.startswith(f"{SHARDS}/")}
    # A folder, because safetensors first writes a file beside the one it is given, and a crash may leave that.
    staging = staging_path(path / "whole")
    with storing(path), removed_on_failure(staging):
        staging.mkdir()
        for part, read in (("optimizer", checkpoint.optimizer_tensors), ("model", checkpoint.model_tensors)):
            name = f"{part}.safetensors"
            write_tensors(staging / name, read())
            flush_to_disk(staging / name)
            rename(staging / name, path / name)
        staging.rmdir()
        flush_to_disk(path)  # power loss must not keep the new manifest and lose a name in it
        write_manifest(path, other_files | flushed_files(path, path.glob("*.safetensors")))
        flush_to_disk(path)
        shutil.rmtree(path / SHARDS)
