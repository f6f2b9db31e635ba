"""Dropout of what the blocks add to x. The random numbers are a function of a seed per sequence.

B sequences of T tokens, L layers. A block adds two outputs to x: that of its attention (0) and that of its MLP (1).
Each random number is computed from (seed of the sequence, layer, output, token, channel); it is not the next number of a
generator. So neither the micro-batch, nor the number of ranks, nor a resume, nor activation checkpointing changes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from andrea.config import ModelConfig

HALF = 2**15 - 1
ROUND_FACTORS = (46501, 40503, 49843, 53669)  # odd numbers of 16 bits; with one round less, the last bits are not mixed


class BlockDropout(NamedTuple):
    """What is dropped from the two outputs of one block. (A NamedTuple, because FSDP finds tensors inside tuples.)"""

    keys: Tensor  # (2, B) int32, of the random numbers
    limit: Tensor  # (B,) int32: an output's number is dropped if its random number is below the limit
    scale: Tensor  # (B,): the factor that keeps the expectation unchanged

    def __call__(self, output: Tensor, which: int) -> Tensor:
        """Drop from output (B, T, d_model) of the attention (which=0) or of the MLP (which=1)."""
        tokens, channels = (torch.arange(n, dtype=torch.int32, device=output.device) for n in output.shape[1:])
        random = mixed(mixed(self.keys[which][:, None] ^ tokens)[..., None] ^ channels)  # (B, T, d_model)
        return torch.where(random >= self.limit[:, None, None], output, 0.0) * self.scale[:, None, None]


def block_dropouts(seeds: Tensor, config: ModelConfig) -> list[BlockDropout]:
    """The `BlockDropout` of each layer for B sequences with seeds (B,) int64. Nothing is dropped where a seed is -1.

    Each number of an output becomes 0 with probability config.dropout (Srivastava et al. 2014, JMLR 15). What remains is
    divided by the probability of being kept, so that evaluation needs no change.
    """
    n_layer, device, drops = config.n_layer, seeds.device, seeds >= 0
    streams = torch.arange(2 * n_layer, dtype=torch.int32, device=device).view(n_layer, 2, 1)
    keys = mixed(mixed(streams) ^ seeds.clamp(min=0).to(torch.int32))  # (L, 2, B)
    limit = torch.where(drops, limit_of(config.dropout), 0).to(torch.int32)
    scale = torch.where(drops, 1 / (1 - config.dropout), 1.0)
    return [BlockDropout(layer_keys, limit, scale) for layer_keys in keys]


def limit_of(share: float) -> int:
    """The limit below which `share` of all numbers of 30 bits are."""
    return int(share * 2**30)


def mixed(x: Tensor) -> Tensor:
    """A permutation of the int32 numbers from 0 to 2^30 - 1: every bit of the result depends on every bit of x.

    It is a Feistel network (Luby and Rackoff 1988) on two halves of 15 bits. No product exceeds an int32: the result of an
    overflow is undefined in C++, and compiled code would drop other numbers than eager code.
    """
    left, right = x >> 15, x & HALF
    for factor in ROUND_FACTORS:
        left, right = right, left ^ (right * factor >> 7 & HALF)
    return right << 15 | left
