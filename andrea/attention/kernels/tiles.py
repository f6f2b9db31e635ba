"""Tile sizes of our Triton kernels, by head width, input type and kind of GPU. `python bench/attention.py --tune` times others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Tile sizes (queries M, keys N), warps and pipeline stages of one kernel."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tuning:
    forward: Blocks
    keys: Blocks  # dK, dV
    queries: Blocks  # dQ


def tuning(query: Tensor, value: Tensor) -> Tuning:
    """The tiles for query (B, H, T, D) and value (B, G, S, Dv)."""
    return tiles_of(padded(max(query.shape[-1], value.shape[-1])), query.dtype, capability_of(query))


def tiles_of(width: int, dtype: torch.dtype, capability: int) -> Tuning:
    """Tiles for the padded head width, input type and compute capability (80, 86, 89, 90, 100, 120).

    For Hopper and heads of at most 128 in 16 bits, the tiles were the fastest on an H200 at 1,024 keys. The others are the
    largest that spill no registers, according to bench/kernel_resources.py; no such GPU has measured them yet.

    bench/README.md has what else was compiled in order to overlap products and softmax, and why it is not used.
    """
    if capability >= 120:  # consumer Blackwell has the matrix instructions of Ampere, and 99 KiB of shared memory
        of_ampere = tiles_of(width, dtype, 80)
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
