"""Finds the device of each rank and its free memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from andrea.config import UserError
from andrea.runtime.device import choose_device
from andrea.training.parallel.ranks import Ranks

GIB = 2**30
USABLE_SHARE = 0.8  # of the free memory: a plan is not exact, and other programs need memory too
CARD = torch.device("cuda")
FREE_ON_CARD = {24: 23 * GIB, 80: 78 * GIB}  # bytes that are free on a GPU of so many GB


@dataclass(frozen=True)
class Placement:
    """The facts that a memory plan needs: device, precision of the matrix products, number of ranks, FSDP or not."""

    device: torch.device
    precision: str
    ranks: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class Machine:
    """The device and memory that a run may use. free_bytes: the smallest free memory of any rank."""

    device: torch.device
    ranks: Ranks
    free_bytes: float

    @classmethod
    def of_rank(cls, asked_device: str, ranks: Ranks) -> Machine:
        """The machine as this rank uses it. Every rank must call this. Raises UserError for fewer GPUs than ranks."""
        device = ranks.rank_0_first(lambda: device_of_rank(asked_device, ranks))
        sharing = ranks.local_size if device.type == "cpu" else 1  # the ranks of one machine share its memory
        return cls(device, ranks, float(ranks.minimum(torch.tensor(free_bytes(device) / sharing))))


def device_of_rank(asked: str, ranks: Ranks) -> torch.device:
    """The device of a rank. A rank's own GPU is already its current device. Raises UserError for too few GPUs."""
    device = choose_device(asked)
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.size > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"device={asked} is one device, but there are {ranks.size} ranks; use device=cuda or device=cpu"
        )
    if 1 < cards < ranks.local_size:  # one visible GPU is fine: SLURM can show each rank a different one
        raise UserError(
            f"there are {ranks.local_size} ranks on this machine, but {cards} GPUs; use --nproc-per-node={cards}"
        )
    return device


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().split("\n")
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
