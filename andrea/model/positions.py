"""How a model knows where a token stands: learned vectors, rotary turns, or not at all.

B batch, T tokens, H heads, D = d_head. A forward pass asks for the positions start .. start + T - 1, where start is an
int or, in compiled decoding, a 0-d tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from andrea.attention import Place
from andrea.config import ModelConfig


class Position(nn.Module, ABC):
    @abstractmethod
    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        """Put positions into the token vectors (B, T, d_model)."""

    @abstractmethod
    def placer(self, n_token: int, start: int | Tensor) -> Place | None:
        """What puts positions into queries and keys (B, H, T, D), or None."""


class NoPosition(Position):
    """The causal mask alone tells order (Haviv et al. 2022, arXiv 2203.16634)."""

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x

    def placer(self, n_token: int, start: int | Tensor) -> None:
        return None


class LearnedPosition(Position):
    """One learned vector a position, added to the token's, as in GPT-2."""

    def __init__(self, sequence_length: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sequence_length, d_model))

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x + rows(self.weight, start, x.shape[1])

    def placer(self, n_token: int, start: int | Tensor) -> None:
        return None


class RotaryPosition(Position):
    """Turns pair p of a query or key at position t by t * base^(-2p / D), so that their dot product depends on the
    distance alone (Su et al. 2021, arXiv 2104.09864, eq. 34). Pair p is entries p and p + D/2.
    """

    def __init__(self, sequence_length: int, d_head: int, base: float) -> None:
        super().__init__()
        pair = torch.arange(0, d_head, 2, dtype=torch.float64, device="cpu") / d_head
        angle = torch.arange(sequence_length, dtype=torch.float64, device="cpu")[:, None] * base**-pair  # (S, D/2)
        cosine = torch.cat((angle.cos(), angle.cos()), dim=-1)
        sine = torch.cat((-angle.sin(), angle.sin()), dim=-1)
        table = torch.stack((cosine, sine), dim=1).float()  # (S, 2, D)
        # Kept as the bits of fp32 numbers: Module.to(bfloat16) would round a buffer of floats.
        self.register_buffer("table_bits", table.view(torch.int32), persistent=False)

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x

    def placer(self, n_token: int, start: int | Tensor) -> Place:
        cosine, sine = rows(self.table_bits.view(torch.float32), start, n_token).unbind(-2)  # (T, D) each, or (B, T, D)
        if cosine.ndim == 3:
            cosine, sine = cosine[:, None], sine[:, None]  # for the heads

        def turn(x: Tensor) -> Tensor:
            return (x * cosine + x.roll(x.shape[-1] // 2, dims=-1) * sine).to(x.dtype)

        return turn


def make_position(config: ModelConfig) -> Position:
    if config.position == "rotary":
        return RotaryPosition(config.sequence_length, config.d_head, config.rotary_base)
    if config.position == "learned":
        return LearnedPosition(config.sequence_length, config.d_model)
    return NoPosition()


def rows(table: Tensor, start: int | Tensor, count: int) -> Tensor:
    """table[start : start + count]; with a tensor as start, 0-d or (B,), without asking the device for its value."""
    if isinstance(start, int):
        assert start + count <= len(table), f"position {start + count - 1} is past sequence_length={len(table)}"
        return table[start : start + count]
    position = start[..., None] + torch.arange(count, device=table.device)
    return table[position.clamp(max=len(table) - 1)]  # what fills up a text may lie beyond
