"""Reads and writes a checkpoint's safetensors files. In a sharded run, each file holds some rows of a tensor."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from andrea.checkpoint.errors import Damaged, opening

OFFSETS = "DCP_SHARDING_INFO"  # entry of a file's header: tensor name -> offset of the file's part
MOST_DIMENSIONS = 8
OS_ERROR = re.compile(r"\(os error (\d+)\)|unable to .*\((\d+)\)$")  # of safetensors, or of torch
# The errors of reading a file with a malformed header. RecursionError is a RuntimeError.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


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
            raise Damaged(
                f"{parts[0].path} is damaged: {name} holds numbers that are not finite; use an older checkpoint"
            )
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
