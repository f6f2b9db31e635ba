"""Reads and writes a checkpoint's safetensors files, and defines the error of a checkpoint that cannot be used.

In a sharded run each rank writes its own rows, in two files:

    shards/shard-00001-model-00001-of-00002.safetensors     the rows of the weights that rank 0 keeps
    shards/shard-00001-model-00002-of-00002.safetensors     the optimizer's state of these rows

A file's header gives, for each tensor, the row of the whole tensor at which the file's part begins. This is the layout
of torch.distributed.checkpoint, whose HuggingFaceStorageReader can read the files too.
"""

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.runtime.files import reading

OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # with these errors every checkpoint looks damaged
OFFSETS = "DCP_SHARDING_INFO"  # entry of a file's header: tensor name -> offset of the file's part
MOST_DIMENSIONS = 8
OS_ERROR = re.compile(r"\(os error (\d+)\)|unable to .*\((\d+)\)$")  # of safetensors, or of torch
# The errors of reading a file with a malformed header. RecursionError is a RuntimeError.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class Damaged(UserError):
    """The folder is not a complete checkpoint of this project. The message names the folder or file and the fault."""

    @property
    def may_be_whole(self) -> bool:
        """Whether it could only not be read now: it may be readable the next time."""
        cause = self.__cause__
        return isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """An OSError of the checkpoint at `path` becomes Damaged, or StorageFailed if this process can open no more files."""
    try:
        yield
    except OSError as error:
        if error.errno in OF_THE_PROCESS:
            with reading(path):
                raise
        name = f"{Path(error.filename).name}: " if error.filename else ""
        reason = f"{name}{error.strerror or error}; name another with checkpoint=…"
        raise Damaged(f"{path} is not a complete checkpoint of this project, or cannot be read: {reason}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        raise of_system(error) from error


def of_system(error: Exception) -> OSError:
    """The OSError in an error of safetensors or torch, whose text ends in "… (os error 28)" or "… (28)"."""
    found = OS_ERROR.search(str(error))
    number = int(found[1] or found[2]) if found else None
    return OSError(str(error)) if number is None else OSError(number, os.strerror(number))


def write_shard(folder: Path, rank: int, tensors: dict[str, Tensor], first_rows: dict[str, int]) -> list[Path]:
    """Write one rank's rows in two files, weights and optimizer state; first_rows: of each tensor. Raises OSError."""
    paths = []
    for number, of_optimizer in ((1, False), (2, True)):
        chosen = {name: tensor for name, tensor in tensors.items() if ("/" in name) == of_optimizer}
        offsets = {name: [first_rows[name], *[0] * tensor.ndim][: tensor.ndim] for name, tensor in chosen.items()}
        info = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
        paths.append(folder / f"shard-{rank + 1:05d}-model-{number:05d}-of-00002.safetensors")
        write_tensors(paths[-1], chosen, {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: info})
    return paths


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one file holds. `first`: the row of the whole tensor at which the part begins."""

    path: Path
    file: Any  # of safetensors.safe_open
    first: int
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32

    @property
    def stop(self) -> int:
        return self.first + self.shape[0]


class TensorReader:
    """Reads tensors by name from safetensors files. Every method raises Damaged for a malformed file."""

    def __init__(self, paths: list[Path]) -> None:
        from safetensors import SafetensorError

        self.paths = paths
        self.parts: dict[str, list[Part]] = {}
        for path in paths:
            try:
                self.add_file(path)
            except (SafetensorError, OSError, *MALFORMED) as error:
                raise_damaged(path, error)
        for name, parts in self.parts.items():
            if len({len(part.shape) for part in parts}) > 1:
                raise Damaged(f"{parts[0].path} is damaged: other files hold {name} with another number of dimensions")
            parts.sort(key=lambda part: part.first)

    def add_file(self, path: Path) -> None:
        from safetensors import safe_open

        file = safe_open(path, framework="pt")
        info = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
        for name in file.keys():  # noqa: SIM118 (the file itself is not iterable)
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            if len(shape) > MOST_DIMENSIONS:  # torch takes a time that grows with their square
                raise ValueError(f"{name:.60} has {len(shape):,} dimensions")
            first = int(info[name]["saved_offsets"][0]) if shape and name in info else 0
            self.parts.setdefault(name, []).append(Part(path, file, first, shape, part.get_dtype()))

    @property
    def names(self) -> list[str]:
        return sorted(self.parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each whole tensor, from the headers alone."""
        return {
            name: (parts[-1].stop, *parts[0].shape[1:]) if parts[0].shape else () for name, parts in self.parts.items()
        }

    def dtypes(self, name: str) -> set[str]:
        return {part.dtype for part in self.parts[name]}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The whole tensor, or its rows `rows.start` to `rows.stop`, on the CPU. Raises Damaged if it is not finite."""
        from safetensors import SafetensorError

        if name not in self.parts:
            raise Damaged(f"{self.paths[0].parent} is damaged: it has no {name}")
        parts = self.parts[name]
        try:
            tensor = read_rows(name, parts, rows) if parts[0].shape else parts[0].file.get_tensor(name)
        except (SafetensorError, OSError, *MALFORMED) as error:
            raise_damaged(parts[0].path, error)
        comparable = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isfinite of 8-bit floats
        if not bool(comparable.isfinite().all()):  # training never saves such numbers and could not continue from them
            raise Damaged(f"{parts[0].path} is damaged: {name} holds numbers that are not finite; use an older one")
        return tensor


def raise_damaged(path: Path, error: Exception) -> NoReturn:
    if OS_ERROR.search(str(error)) or isinstance(error, OSError):
        with opening(path):
            raise error if getattr(error, "errno", None) else of_system(error)
    raise Damaged(f"{path} is damaged: {error}") from None


def read_rows(name: str, parts: list[Part], rows: slice | None) -> Tensor:
    """Rows of a tensor with at least one dimension, put together from its sorted parts."""
    position, stop = (rows.start, rows.stop) if rows is not None else (0, parts[-1].stop)
    pieces = []
    for part in parts:
        end = min(stop, part.stop)
        if part.first <= position < end:
            pieces.append(part.file.get_slice(name)[position - part.first : end - part.first])
            position = end
    if position < stop:
        raise ValueError(f"rows {position} to {stop} of {name} are in none of its files")
    if not pieces:
        return parts[0].file.get_tensor(name)[:0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
