"""Keys and values kept for generation, so that a new token attends to the past without computing it again.

B batch, H heads, S room for tokens (fixed when made), T new tokens, D = d_head.
The state is an argument, never hidden in a module. It is written in place: a copy for every token would cost more
than the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """One layer's keys and values (B, H, S, D), of which the first `length` are filled."""

    keys: Tensor
    values: Tensor
    length: int | Tensor

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new keys and values (B, H, T, D) after the filled ones; return what a query may have to see.

        length is an int: only the filled part comes back. A tensor: the whole room, of constant shape; what is not
        filled stands after every query, so that the causal mask hides it.
        """
        n_new = key.shape[2]
        if isinstance(self.length, int):
            stop = self.length + n_new
            assert stop <= self.keys.shape[2], f"{stop} tokens do not fit a cache with room for {self.keys.shape[2]}"
            self.keys[:, :, self.length : stop] = key
            self.values[:, :, self.length : stop] = value
            return self.keys[:, :, :stop], self.values[:, :, :stop]
        position = self.length + torch.arange(n_new, device=key.device)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        return self.keys, self.values


class KeyValueCache:
    """All layers' keys and values; `length` tokens have been seen and the next one stands at position `length`.

    `length` is an int for eager code, or (fixed_shapes) a 0-d int64 tensor: then every step of a decoding loop runs
    the same compiled graph.
    """

    def __init__(
        self,
        n_layer: int,
        n_batch: int,
        n_head: int,
        n_room: int,
        d_head: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fixed_shapes: bool = False,
    ) -> None:
        shape = (n_batch, n_head, n_room, d_head)
        # Zeros, not empty: a hidden NaN times a weight of zero would still be NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.length: int | Tensor = torch.zeros((), dtype=torch.int64, device=device) if fixed_shapes else 0

    @property
    def n_room(self) -> int:
        return self.keys[0].shape[2]

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self.keys[index], self.values[index], self.length)

    def advance(self, n_new: int) -> None:
        """T tokens have been appended to every layer."""
        self.length += n_new

    def clear(self) -> None:
        """Forget everything, keep the room."""
        self.length *= 0
