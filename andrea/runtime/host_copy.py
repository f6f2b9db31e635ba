"""Copies numbers from a device to the host without making the host wait for work that was queued later."""

from __future__ import annotations

from collections.abc import Sequence

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
