"""Positions of tokens: learned vectors, rotary positions, or none. ALiBi changes scores, in attention/modifiers.py.

B batch, T tokens, S = sequence_length, H heads, D = d_head. A forward pass uses positions start .. start + T - 1. `start` is an
int, or a 0-d tensor in compiled decoding, or a tensor (B,) for sequences of different lengths.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from andrea.attention import Rotation
from andrea.config import ModelConfig


class Position(nn.Module):
    """No encoding: the model infers order from the causal mask (Haviv et al. 2022, arXiv 2203.16634) or ALiBi.

    A subclass is an encoding. It is added to token vectors (`add`), or applied to queries and keys (`placer`).
    """

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        """Add position encodings to the token vectors x (B, T, d_model). Only learned positions change x."""
        return x

    def placer(self, n_token: int, start: int | Tensor) -> Rotation | None:
        """What encodes positions in queries and keys (B, H, T, D); None if the encoding is not rotary."""
        return None


class LearnedPosition(Position):
    """A learned vector for each position is added to the token's vector, as in GPT-2."""

    def __init__(self, sequence_length: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sequence_length, d_model))

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x + rows(self.weight, start, x.shape[1])


class RotaryPosition(Position):
    """Rotate pair p of a query or key at position t by the angle t · base^(-2p / R), in radians (RoPE).

    Entries p and p + D/2 form pair p. R = share · D of the D entries are rotated: the pairs p < R/2. The other pairs
    carry no position (partial rotary: Black et al. 2022, arXiv 2204.06745, section 2.1; there the rotated entries are
    the first R ones, which is another order of the rows of W_Q and W_K). The dot product of a query and a key then
    depends on the distance between their positions, not on the positions themselves (Su et al. 2021, arXiv 2104.09864,
    eq. 34). scaling: see `scaled`.
    """

    def __init__(
        self,
        sequence_length: int,
        d_head: int,
        base: float,
        share: float = 1.0,
        scaling: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        n_rotated = 2 * round(share * d_head / 2)  # R
        pair = torch.arange(0, n_rotated, 2, dtype=torch.float64, device="cpu") / max(1, n_rotated)
        frequency = base**-pair if scaling is None else scaled(base**-pair, *scaling)  # radians per position, (R/2,)
        angle = torch.arange(sequence_length, dtype=torch.float64, device="cpu")[:, None] * frequency  # (S, R/2)
        angle = pad(angle, (0, (d_head - n_rotated) // 2))  # (S, D/2)
        cosine = torch.cat((angle.cos(), angle.cos()), dim=-1)
        sine = torch.cat((-angle.sin(), angle.sin()), dim=-1)
        table = torch.stack((cosine, sine), dim=1).float()  # (S, 2, D)
        # Stored as the bits of the fp32 numbers, because Module.to(bfloat16) would round a buffer of floats.
        self.register_buffer("table_bits", table.view(torch.int32), persistent=False)

    def placer(self, n_token: int, start: int | Tensor) -> Rotation:
        cosine, sine = rows(self.table_bits.view(torch.float32), start, n_token).unbind(-2)  # (T, D) each, or (B, T, D)
        if cosine.ndim == 3:
            cosine, sine = cosine[:, None], sine[:, None]  # (B, 1, T, D): the same for all heads
        return Rotation(cosine, sine)


def scaled(frequency: Tensor, factor: float, *how: float) -> Tensor:
    """Frequencies (R/2,) in radians per position for texts `factor` times as long.

    With the factor alone all pairs turn `factor` times slower (position interpolation: Chen et al. 2023, arXiv 2306.15595,
    section 2.3). how: low, high, length, as in Llama 3.1 (arXiv 2407.21783, and its code): a pair that turns fewer than `low`
    times in `length` positions turns `factor` times slower, one that turns more than `high` times is unchanged, and between
    the two the share of the change falls in proportion to the number of turns.
    """
    if not how:
        return frequency / factor
    low, high, length = how
    n_turn = length * frequency / (2 * torch.pi)
    unchanged = ((n_turn - low) / (high - low)).clamp(0, 1)
    return frequency * (unchanged + (1 - unchanged) / factor)


def make_position(config: ModelConfig) -> Position:
    if config.position == "rotary":
        return RotaryPosition(
            config.sequence_length, config.head_width, config.rotary_base, config.rotary_share, config.rotary_scaling
        )
    if config.position == "learned":
        return LearnedPosition(config.sequence_length, config.d_model)
    return Position()


def rows(table: Tensor, start: int | Tensor, count: int) -> Tensor:
    """table[start : start + count], for each sequence if start is (B,). A tensor `start` is not copied to the host."""
    if isinstance(start, int):
        assert start + count <= len(table), f"position {start + count - 1} is past sequence_length={len(table)}"
        return table[start : start + count]
    position = start[..., None] + torch.arange(count, device=table.device)
    return table[position.clamp(max=len(table) - 1)]  # padding may have positions beyond the table
