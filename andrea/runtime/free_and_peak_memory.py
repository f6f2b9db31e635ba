"""How much memory this process may still allocate, by the machine and by limits on it; its peak; errors of lacking memory.

Docker, Kubernetes and SLURM limit a process by Linux control groups. A process that exceeds such a limit is killed without
a word, and /proc/meminfo shows the memory of the whole machine all the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from andrea.runtime.system import resource

if TYPE_CHECKING:  # commands that load no torch import this module
    import torch

ROOT = Path("/")
UNKNOWN_BYTES = 4 << 30  # where no system call tells
# Of control groups of version 1 and 2: their folder, and the names of the limit, the memory used, and the files of it
GROUPS_1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
GROUPS_2 = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"


def free_host_bytes(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> int:
    """The least of the machine's free memory and of what each limit leaves. root: the folder that holds /proc and /sys."""
    free = [free_of_machine(root), *free_of_groups(root), *free_of_address_space(root), *free_of_job(root, environment)]
    return max(0, min(free))


def held_bytes(root: Path = ROOT) -> int:
    """The memory that this process holds now; 0 where no system call tells."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return pages_of_process(root)[1] * os.sysconf("SC_PAGE_SIZE")
    return 0


def free_of_machine(root: Path) -> int:
    """Linux tells it; elsewhere half of all memory is taken to be free."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return named_numbers(root / "proc" / "meminfo")["MemAvailable:"] * 1024
    if not hasattr(os, "sysconf"):  # Windows
        return UNKNOWN_BYTES
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def free_of_groups(root: Path) -> Iterator[int]:
    """What each control group above this process leaves, of both versions. Files that Linux has read count as free."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().split("\n")
    except OSError:
        return
    for membership in memberships:
        _, _, rest = membership.partition(":")
        controllers, _, path = rest.partition(":")
        if not path or (controllers and "memory" not in controllers.split(",")):
            continue
        place, limit, used, cached = GROUPS_1 if controllers else GROUPS_2
        top = root / place
        group = top / path.lstrip("/")  # does not exist in a container that sees only its own group, as the top
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
                reclaimable = named_numbers(folder / "memory.stat").get(cached, 0)
                yield int((folder / limit).read_text()) - int((folder / used).read_text()) + reclaimable
            if folder == top:
                break


def free_of_address_space(root: Path) -> Iterator[int]:
    """What `ulimit -v` leaves."""
    if resource is None:
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            yield limit - pages_of_process(root)[0] * resource.getpagesize()


def free_of_job(root: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """What the memory that was asked of SLURM leaves, also where SLURM makes no control groups. 0 asks for all of it."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        if limit := int(environment["SLURM_MEM_PER_NODE"]) << 20:
            yield limit - held_bytes(root)


def pages_of_process(root: Path) -> tuple[int, int]:
    """The pages of this process's address space, and those of them in memory."""
    total, resident, *_ = (root / "proc/self/statm").read_text().split()
    return int(total), int(resident)


def named_numbers(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    lines = (line.split() for line in path.read_text().split("\n"))
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


# torch has its own exception only for the memory of a GPU. On a CPU an allocation fails at a limit (`ulimit -v`), or on a machine
# without swap. Then torch raises a RuntimeError, and Python and numpy raise a MemoryError.
ALLOCATION_FAILED = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` was raised because a GPU or this process has no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILED)


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory so far: of tensors on a GPU, or of this process on a CPU. 0 on Windows, which does not tell it.

    `Trainer.conclude` records it at the end of a run.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
