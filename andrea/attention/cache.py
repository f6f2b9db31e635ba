"""Key/value cache for generation: a new token attends to earlier tokens without computing their keys and values again.

B batch, H heads, S capacity in tokens (fixed when the cache is made), T new tokens, D = d_head.
The cache is passed as an argument; no module stores it. New keys and values are written in place, because copying the
cache for every token would cost more than the attention.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.runtime.device import LargePages


def write(kept: Tensor, new: Tensor, length: int | Tensor) -> None:
    """Write T new rows (B, H, T, D) into `kept` (B, H, S, D), after the `length` filled ones: see `LayerCache`."""
    n_new = new.shape[2]
    if isinstance(length, int):
        stop = length + n_new
        assert stop <= kept.shape[2], f"{stop} tokens do not fit a cache with a capacity of {kept.shape[2]} tokens"
        kept[:, :, length:stop] = new
        return
    position = length[..., None] + torch.arange(n_new, device=new.device)
    if position.ndim == 1:
        kept.index_copy_(2, position, new)
    else:
        sequence = torch.arange(len(new), device=new.device)[:, None]
        kept[sequence, :, position] = new.transpose(1, 2)  # (B, T) positions of (H, D) each


def rows_before(kept: Tensor, length: int | Tensor, n_before: int) -> Tensor:
    """The last n_before rows of the `length` filled ones of `kept` (B, H, S, D); zeros in front of the first row."""
    start = length if isinstance(length, int) else length[..., None]
    position = start + torch.arange(-n_before, 0, device=kept.device)  # (n_before,), or (B, n_before)
    if position.ndim == 1:
        return kept[:, :, position.clamp(min=0)].masked_fill((position < 0)[:, None], 0)
    sequence = torch.arange(len(kept), device=kept.device)[:, None]
    before = kept[sequence, :, position.clamp(min=0)]  # (B, n_before, H, D)
    return before.masked_fill((position < 0)[..., None, None], 0).transpose(1, 2)


@dataclass
class LayerCache:
    """One layer's keys and values (B, H, S, D); the first `length` tokens of each sequence are filled.

    length: an int or a 0-d tensor for all sequences, or a tensor (B,) with the length of each sequence.
    filled: the largest length of any sequence, used if `length` is a tensor; None if only the device knows this number.
    projected: queries, keys and values before the convolution, (B, H + 2G, S, D), filled as far; None without one.
    """

    keys: Tensor
    values: Tensor
    length: int | Tensor
    filled: int | None = None
    projected: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new keys and values (B, H, T, D) after the filled ones; return the keys and values to attend to.

        If the host knows how many tokens are filled, `append` returns the filled and the new ones. Otherwise it returns
        the whole capacity, so that the shape is constant. The unfilled part comes after every query, so the causal mask
        hides it.
        """
        write(self.keys, key, self.length)
        write(self.values, value, self.length)
        if isinstance(self.length, int):
            stop = self.length + key.shape[2]
        else:
            stop = self.keys.shape[2] if self.filled is None else self.filled + key.shape[2]
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def append_projected(self, projected: Tensor, n_before: int) -> Tensor:
        """Write T new rows (B, H + 2G, T, D) after the filled ones; return the n_before rows in front of them.

        A row in front of the first token is zero.
        """
        write(self.projected, projected, self.length)
        return rows_before(self.projected, self.length, n_before)


class KeyValueCache:
    """The keys and values of all layers. The cache holds `length` tokens; the next token stands at position `length`.

    `length` is an int for eager code. With fixed_shapes it is a 0-d int64 tensor, so that every step of a decoding loop
    runs the same compiled graph. With ragged it is a tensor (B,), for sequences of different lengths.
    """

    def __init__(
        self,
        n_layer: int,
        n_batch: int,
        n_head: int,
        capacity: int,
        d_head: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fixed_shapes: bool = False,
        ragged: bool = False,
        n_projected: int = 0,
        keeps_tokens: bool = False,
    ) -> None:
        """n_projected: H + 2G, for a model with a convolution, which needs `LayerCache.projected`; otherwise 0.

        keeps_tokens: for `append_tokens`, which a model with bigrams needs.
        """
        shape = (n_batch, n_head, capacity, d_head)
        wide, n_wide = (n_batch, n_projected, capacity, d_head), n_layer if n_projected else 0
        # Zeros, because uninitialised memory may hold NaN, and NaN times a masked weight of zero is NaN.
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        if torch.device(device).type == "cpu":
            n_bytes = [LargePages.aligned_bytes(math.prod(each) * dtype.itemsize) for each in (shape, wide)]
            zeros = functools.partial(LargePages(2 * n_layer * n_bytes[0] + n_wide * n_bytes[1]).zeros, dtype=dtype)
        self.keys, self.values = ([zeros(shape) for _ in range(n_layer)] for _ in range(2))
        self.projected = [zeros(wide) for _ in range(n_wide)]
        # Tokens + 1, so that 0 stands for none: (B, 1, S, 1), as rows of width 1.
        tokens = (n_batch, 1, capacity, 1)
        self.tokens = torch.zeros(tokens, dtype=torch.int64, device=device) if keeps_tokens else None
        self.length: int | Tensor = 0
        if fixed_shapes or ragged:
            self.length = torch.zeros((n_batch,) if ragged else (), dtype=torch.int64, device=device)
        self.filled = 0 if ragged and not fixed_shapes else None

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    @property
    def n_bytes(self) -> int:
        """The memory of all keys and values, and of what is kept before the convolution."""
        return sum(each.nbytes for each in (*self.keys, *self.values, *self.projected))

    def layer(self, index: int) -> LayerCache:
        projected = self.projected[index] if self.projected else None
        return LayerCache(self.keys[index], self.values[index], self.length, self.filled, projected)

    def append_tokens(self, tokens: Tensor) -> Tensor:
        """Keep T new tokens (B, T) after the filled ones; return the token before each of them, -1 before the first."""
        write(self.tokens, tokens[:, None, :, None] + 1, self.length)
        before = rows_before(self.tokens, self.length, 1)[:, 0, :, 0] - 1  # (B, 1)
        return torch.cat([before, tokens[:, :-1]], dim=1)

    def advance(self, n_new: int) -> None:
        """Add n_new to the length, after n_new tokens have been appended to every layer."""
        self.length += n_new
        if self.filled is not None:
            self.filled += n_new

    def set_lengths(self, lengths: list[int]) -> None:
        """Shorten sequence i to its first lengths[i] tokens. Later tokens overwrite the removed ones."""
        if isinstance(self.length, int) or self.length.ndim == 0:
            assert len(set(lengths)) == 1, (
                f"all sequences in this cache must be equally long, got {lengths}; make the cache ragged"
            )
            self.length = lengths[0] if isinstance(self.length, int) else self.length.fill_(lengths[0])
        else:
            self.length.copy_(torch.tensor(lengths))
        if self.filled is not None:
            self.filled = max(lengths)

    def of_sequence(self, index: int) -> KeyValueCache:
        """An empty cache for sequence `index` alone. It is a view: it shares the memory of this cache."""
        part = object.__new__(KeyValueCache)
        part.keys = [keys[index : index + 1] for keys in self.keys]
        part.values = [values[index : index + 1] for values in self.values]
        part.projected = [rows[index : index + 1] for rows in self.projected]
        part.tokens = None if self.tokens is None else self.tokens[index : index + 1]
        part.length, part.filled = 0, None
        return part

    def copy_sequence(self, source: int, n_token: int) -> None:
        """Copy the first n_token keys and values of sequence `source` to all sequences."""
        for kept in (*self.keys, *self.values, *self.projected, *([] if self.tokens is None else [self.tokens])):
            kept[:, :, :n_token] = kept[source : source + 1, :, :n_token].clone()
