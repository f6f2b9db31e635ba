"""What a run may use: the device of each rank and the memory that is free on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from andrea.config import UserError
from andrea.runtime.device import choose_device
from andrea.training.parallel.ranks import Ranks

GIB = 2**30
USABLE_SHARE = 0.8  # of the free memory; a plan errs, and other programs run too
CARD = torch.device("cuda")
CARD_BYTES = 78 * GIB  # free on a card of 80 GB


@dataclass(frozen=True)
class Placement:
    """How a run is laid out, for its memory plan: precision of the products, number of ranks, FSDP or not."""

    device: torch.device
    precision: str
    ranks: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class Machine:
    """free_bytes: memory that every rank may count on, that of the rank with the least."""

    device: torch.device
    ranks: Ranks
    free_bytes: float

    @classmethod
    def of_rank(cls, asked_device: str, ranks: Ranks) -> Machine:
        """Every rank must call. Raises UserError where there are fewer cards than ranks."""
        device = ranks.rank_0_first(lambda: device_of_rank(asked_device, ranks))
        sharing = ranks.local_size if device.type == "cpu" else 1  # the ranks of one machine share its memory
        return cls(device, ranks, float(ranks.minimum(torch.tensor(free_bytes(device) / sharing))))


def device_of_rank(asked: str, ranks: Ranks) -> torch.device:
    """Each rank has its own card, which is already its current device. Raises UserError where there are too few."""
    device = choose_device(asked)
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.size > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"device={asked} is one device, and there are {ranks.size} ranks; use device=cuda or device=cpu"
        )
    if 1 < cards < ranks.local_size:  # a single visible card may be a different one for each rank: SLURM can do that
        raise UserError(f"{ranks.local_size} ranks on this machine have {cards} cards; use --nproc-per-node={cards}")
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated now: the card's, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
