"""Copies to pinned memory of the host: numbers that are read without waiting for later work, and memory for large copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class HostCopy:
    """Numbers that the host reads when it needs them.

    On CUDA, the copy into pinned memory is queued behind the work that computes the numbers, and an event behind the copy.
    `read` waits for this event alone. Reading a tensor with `item` or `tolist` would wait for all work that was queued up to
    the moment of reading.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        """numbers: 0-dim each, of any type, on the device or on the host. They are kept in fp32."""
        self.done: torch.cuda.Event | None = None  # None: the numbers are read from the device itself
        device = next((each.device for each in numbers if each.device.type != "cpu"), numbers[0].device)
        self.numbers = torch.stack([each.detach().to(device, torch.float32, non_blocking=True) for each in numbers])
        if copies_asynchronously(device):
            on_device, self.numbers = self.numbers, pinned_like(self.numbers)
            self.numbers.copy_(on_device, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()


def runs_ahead(device: torch.device) -> bool:
    """Whether the host queues work for the device, and goes on while the device computes."""
    return device.type != "cpu"


def copies_asynchronously(device: torch.device) -> bool:
    return device.type == "cuda"


def pinned_like(tensor: Tensor) -> Tensor:
    """Memory of the host that the device can write to while the host works on."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


ALIGNMENT_BYTES = 64  # of tensors in a block; more than any type needs
LARGEST_SHARED_BYTES = 2**28  # a larger block is opened for a larger tensor only


def empty_pinned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uninitialised pinned memory of the shape and type of each tensor, by name.

    torch rounds each pinned allocation up to a power of two. Tensors therefore share blocks of such sizes.
    """
    sizes, places = blocks_for({name: tensor.nbytes for name, tensor in tensors.items()})
    blocks = [torch.empty(n_byte, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for n_byte in sizes]
    copies = {}
    for name, (block, offset) in places.items():
        tensor = tensors[name]
        copies[name] = blocks[block][offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copies


def blocks_for(n_bytes: Mapping[str, int]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """The sizes of blocks in bytes, powers of two, and for each name its block and its offset there.

    Largest first, each in the first block that has room (first-fit decreasing). A block has room for its first tensor, and is
    otherwise no larger than all that remains to be placed.
    """
    sizes: list[int] = []
    used: list[int] = []
    places = {}
    remaining = {name: -(-n_byte // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for name, n_byte in n_bytes.items()}
    left = sum(remaining.values())
    for name in sorted(remaining, key=lambda name: (-remaining[name], name)):
        needed = remaining[name]
        block = next((i for i, size in enumerate(sizes) if size - used[i] >= needed), len(sizes))
        if block == len(sizes):
            filled = 2 ** (min(left, LARGEST_SHARED_BYTES).bit_length() - 1)
            sizes.append(max(filled, 2 ** (needed - 1).bit_length()))
            used.append(0)
        places[name] = block, used[block]
        used[block] += needed
        left -= needed
    return sizes, places
