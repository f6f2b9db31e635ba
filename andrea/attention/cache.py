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
    """One layer's keys and values (B, H, S, D), of which the first `length` of each sequence are filled.

    length: an int; or a tensor, of all sequences (0-d) or of each (B,). filled: as many as any sequence has, where the
    host knows it: then no more comes back.
    """

    keys: Tensor
    values: Tensor
    length: int | Tensor
    filled: int | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new keys and values (B, H, T, D) after the filled ones; return what a query may have to see.

        Where the host knows how many are filled only those come back. Else the whole room does, of constant shape; what
        is not filled stands after every query, so that the causal mask hides it.
        """
        n_new = key.shape[2]
        if isinstance(self.length, int):
            stop = self.length + n_new
            assert stop <= self.keys.shape[2], f"{stop} tokens do not fit a cache with room for {self.keys.shape[2]}"
            self.keys[:, :, self.length : stop] = key
            self.values[:, :, self.length : stop] = value
            return self.keys[:, :, :stop], self.values[:, :, :stop]
        position = self.length[..., None] + torch.arange(n_new, device=key.device)
        if position.ndim == 1:
            self.keys.index_copy_(2, position, key)
            self.values.index_copy_(2, position, value)
        else:
            sequence = torch.arange(len(key), device=key.device)[:, None]
            self.keys[sequence, :, position] = key.transpose(1, 2)  # (B, T) places of (H, D)
            self.values[sequence, :, position] = value.transpose(1, 2)
        stop = self.keys.shape[2] if self.filled is None else self.filled + n_new
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KeyValueCache:
    """All layers' keys and values; `length` tokens have been seen and the next one stands at position `length`.

    `length` is an int for eager code; or (fixed_shapes) a 0-d int64 tensor: then every step of a decoding loop runs the
    same compiled graph; or (ragged) a tensor (B,), for sequences of different lengths.
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
        ragged: bool = False,
    ) -> None:
        shape = (n_batch, n_head, n_room, d_head)
        # Zeros, not empty: a hidden NaN times a weight of zero would still be NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.length: int | Tensor = 0
        if fixed_shapes or ragged:
            self.length = torch.zeros((n_batch,) if ragged else (), dtype=torch.int64, device=device)
        self.filled = 0 if ragged and not fixed_shapes else None

    @property
    def n_room(self) -> int:
        return self.keys[0].shape[2]

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self.keys[index], self.values[index], self.length, self.filled)

    def advance(self, n_new: int) -> None:
        """T tokens have been appended to every layer."""
        self.length += n_new
        if self.filled is not None:
            self.filled += n_new

    def set_lengths(self, lengths: list[int]) -> None:
        """Keep so many tokens of each sequence, which may be fewer than were appended: what follows is written over them."""
        if isinstance(self.length, int) or self.length.ndim == 0:
            assert len(set(lengths)) == 1, f"sequences of one length, got {lengths}; make the cache ragged"
            self.length = lengths[0] if isinstance(self.length, int) else self.length.fill_(lengths[0])
        else:
            self.length.copy_(torch.tensor(lengths))
        if self.filled is not None:
            self.filled = max(lengths)

    def of_sequence(self, index: int) -> KeyValueCache:
        """One sequence's share of the same memory, empty."""
        share = object.__new__(KeyValueCache)
        share.keys = [keys[index : index + 1] for keys in self.keys]
        share.values = [values[index : index + 1] for values in self.values]
        share.length, share.filled = 0, None
        return share

    def copy_sequence(self, source: int, n_token: int) -> None:
        """Give all sequences the first n_token keys and values of one."""
        for kept in (*self.keys, *self.values):
            kept[:, :, :n_token] = kept[source : source + 1, :, :n_token].clone()
