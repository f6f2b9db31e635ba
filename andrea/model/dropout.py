"""Dropout and stochastic depth of what the blocks add to x. The random numbers are a function of a seed per sequence.

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

    keys: Tensor | None  # (2, B) int32, of the random numbers; None with model.dropout=0
    limit: Tensor  # (B,) int32: an output's number is dropped if its random number is below the limit
    scale: Tensor  # (2, B): 0 if the output is skipped; otherwise the factor that keeps the expectation unchanged

    def __call__(self, output: Tensor, which: int) -> Tensor:
        """Drop from output (B, T, d_model) of the attention (which=0) or of the MLP (which=1)."""
        if self.keys is not None:
            tokens, channels = (torch.arange(n, dtype=torch.int32, device=output.device) for n in output.shape[1:])
            random = mixed(mixed(self.keys[which][:, None] ^ tokens)[..., None] ^ channels)  # (B, T, d_model)
            output = torch.where(random >= self.limit[:, None, None], output, 0.0)
        return output * self.scale[which][:, None, None]


def block_dropouts(seeds: Tensor, config: ModelConfig) -> list[BlockDropout]:
    """The `BlockDropout` of each layer for B sequences with seeds (B,) int64. Nothing is dropped where a seed is -1.

    Dropout (Srivastava et al. 2014, JMLR 15): each number of an output becomes 0 with probability config.dropout.
    Stochastic depth (Huang et al. 2016, arXiv 1603.09382, eq. 4): in layer l of L, an output is skipped as a whole for a
    sequence with probability l / L · config.stochastic_depth. What remains is divided by the probability of being kept, so
    that evaluation needs no change.
    """
    n_layer, device, drops = config.n_layer, seeds.device, seeds >= 0
    streams = torch.arange(4 * n_layer, dtype=torch.int32, device=device).view(2, n_layer, 2, 1)
    keys, random = mixed(mixed(streams) ^ seeds.clamp(min=0).to(torch.int32)).unbind()  # (L, 2, B) each
    limit = torch.where(drops, limit_of(config.dropout), 0).to(torch.int32)
    skip_shares = [layer / n_layer * config.stochastic_depth for layer in range(1, n_layer + 1)]
    depth_limits = torch.tensor([limit_of(share) for share in skip_shares], dtype=torch.int32, device=device)
    factors = torch.tensor([1 / (1 - share) / (1 - config.dropout) for share in skip_shares], device=device)
    scales = torch.where(random < depth_limits[:, None, None], 0.0, factors[:, None, None])
    scales = torch.where(drops, scales, 1.0)  # (L, 2, B)
    return [
        BlockDropout(layer_keys if config.dropout else None, limit, scale)
        for layer_keys, scale in zip(keys, scales, strict=True)
    ]


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
