"""Tile sizes of our Triton kernels: those measured on this GPU, or else the predicted ones.

`python bench/attention.py --tune` measures them and calls `remember`, which keeps them in the user's cache folder by GPU,
version of Triton, head width, input type and number of keys. Other tiles add in another order, so results computed before
and after a measurement differ by rounding.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.runtime.code_cache import cache_folder
from andrea.runtime.files import replace_text

FILE = "tiles.json"  # in the user's cache folder


@dataclass(frozen=True)
class Blocks:
    """Tile sizes (queries M, keys N), warps and pipeline stages of one kernel."""

    m: int
    n: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no kernel can have, such as those of a damaged file."""
        sides, counts = (self.m, self.n), (self.warps, self.stages)
        if any(type(side) is not int or not 16 <= side <= 256 or side & (side - 1) for side in sides):
            raise ValueError(f"tiles of {self.m} x {self.n}: a side is a power of two from 16 to 256")
        if any(type(count) is not int or not 1 <= count <= 16 for count in counts):
            raise ValueError(f"{self.warps} warps and {self.stages} stages: both are from 1 to 16")


@dataclass(frozen=True)
class Tuning:
    forward: Blocks
    keys: Blocks  # dK, dV
    queries: Blocks  # dQ
    ahead: bool = False  # whether the forward kernel, reading by descriptor, begins the next scores before the softmax


def tuning(query: Tensor, key: Tensor, value: Tensor) -> Tuning:
    """The tiles for query (B, H, T, D), key (B, G, S, D) and value (B, G, S, Dv)."""
    width = padded(max(query.shape[-1], value.shape[-1]))
    measured = measured_tiles(card_of(query), width, query.dtype, key.shape[-2])
    return measured or predicted(width, query.dtype, capability_of(query))


def predicted(width: int, dtype: torch.dtype, capability: int) -> Tuning:
    """Tiles for the padded head width, input type and compute capability (80, 86, 89, 90, 100, 120).

    For Hopper and heads of at most 128 in 16 bits, the tiles were the fastest on an H200 at 1,024 keys. The others are the
    largest that spill no registers, according to bench/kernel_resources.py; no such GPU has measured them yet.

    Within a program, only what the code begins before the softmax can run beside it: a second product of the backward
    kernels, and with `ahead` the next scores of the forward kernel. `ahead` takes 30 to 50 registers, and was never the
    fastest on the H200. bench/README.md has what else was compiled in order to overlap products and softmax, warp
    specialisation for one, and why it is not used.
    """
    if capability >= 120:  # consumer Blackwell has the matrix instructions of Ampere, and 99 KiB of shared memory
        of_ampere = predicted(width, dtype, 80)
        spills = dtype != torch.float32 and width <= 128  # in its kernel for dQ, which reads by descriptor here
        return replace(of_ampere, queries=Blocks(32, 64, 4, 2)) if spills else of_ampere
    if dtype == torch.float32:  # full fp32 products run without tensor cores; larger tiles would spill registers
        if width <= 32:
            return Tuning(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1))
        if width <= 128:
            return Tuning(Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1))
        return Tuning(Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1))
    if width > 128:
        return Tuning(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1))
    if width > 64:
        if capability >= 100:
            return Tuning(Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 2))
        if capability >= 90:
            return Tuning(Blocks(128, 32, 8, 3), Blocks(32, 64, 4, 3), Blocks(128, 64, 8, 3))
        return Tuning(Blocks(128, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(128, 32, 8, 2))
    if capability >= 100:
        return Tuning(Blocks(128, 128, 8, 3), Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 3))
    if capability >= 90:
        return Tuning(Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 2), Blocks(64, 64, 4, 3))
    return Tuning(Blocks(128, 64, 8, 3), Blocks(32, 128, 8, 2), Blocks(128, 64, 8, 2))


def measured_tiles(card: str | None, width: int, dtype: torch.dtype, n_key: int) -> Tuning | None:
    """The tiles measured on this GPU for the padded head width and input type, at the nearest number of keys. Or None."""
    at_lengths = {} if card is None else remembered().get(card, {}).get(kind_of(width, dtype), {})
    if not at_lengths:
        return None
    return at_lengths[min(at_lengths, key=lambda length: abs(math.log(length / max(1, n_key))))]


def remember(card: str, width: int, dtype: torch.dtype, n_key: int, tiles: Tuning) -> Path | None:
    """Keep measured tiles, and return the file. None where the user has no private cache folder. Raises OSError."""
    file = tiles_file()
    if file is None:
        return None
    known = {name: dict(kinds) for name, kinds in remembered().items()}
    kinds = known.setdefault(card, {})
    kinds[kind_of(width, dtype)] = {**kinds.get(kind_of(width, dtype), {}), n_key: tiles}
    plain = {
        name: {kind: {length: asdict(each) for length, each in lengths.items()} for kind, lengths in kinds.items()}
        for name, kinds in known.items()
    }
    replace_text(file, json.dumps(plain, indent=1) + "\n")
    remembered.cache_clear()
    return file


@functools.cache
def remembered() -> dict[str, dict[str, dict[int, Tuning]]]:
    """What the file holds, by GPU, kind and number of keys. Nothing if it is missing or damaged."""
    file = tiles_file()
    try:
        plain = json.loads(file.read_text(encoding="utf-8")) if file else {}
        return {
            card: {
                kind: {int(n_key): tuning_of(each) for n_key, each in lengths.items() if int(n_key) > 0}
                for kind, lengths in kinds.items()
            }
            for card, kinds in plain.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def tuning_of(plain: dict[str, Any]) -> Tuning:
    blocks = {kernel: Blocks(**plain[kernel]) for kernel in ("forward", "keys", "queries")}
    return Tuning(**blocks, ahead=plain.get("ahead") is True)


def tiles_file() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / FILE


def kind_of(width: int, dtype: torch.dtype) -> str:
    return f"{width}, {str(dtype).removeprefix('torch.')}"


def card_of(tensor: Tensor) -> str | None:
    """The GPU's name with the version of Triton, whose compiler decides what a tile costs; None without a GPU."""
    if tensor.device.type != "cuda":
        return None
    import triton  # optional, and missing only where no kernel can run

    return f"{torch.cuda.get_device_name(tensor.device)}, triton {triton.__version__}"


def capability_of(tensor: Tensor) -> int:
    """Compute capability times ten: 80, 90, 100, …; under the interpreter 80.

    Also 80 on an AMD GPU, whose numbers mean other hardware: it has no tensor memory accelerator.
    """
    if tensor.device.type != "cuda" or torch.version.hip is not None:
        return 80
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def padded(width: int) -> int:
    """Width of a tile: the next power of two, and at least the 16 that a matrix product requires."""
    return max(16, 1 << (width - 1).bit_length())
