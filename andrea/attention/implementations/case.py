"""The arguments of one call of attention. They decide which implementations can compute the call.

T queries, S keys, H query heads, G key/value heads (G divides H), widths d_q (query), d_k (key) and d_v (value).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention.compatibility import Compatibility
from andrea.attention.mask import Mask
from andrea.attention.modifiers import ScoreModifiers
from andrea.attention.statistics import AttentionStatistics

Result = tuple[Tensor, AttentionStatistics | None]  # output (..., H, T, d_v); no statistics if Case.statistics is False


@dataclass(frozen=True)
class Case:
    """query (..., H, T, d_q), key (..., G, S, d_k), value (..., G, S, d_v), and how the queries attend to the keys.

    start: position of the first query among the keys; S - T if None.
    modifiers: what changes the scores before the mask, if anything.
    sink: a logit per query head, (H,), or 0-dim without heads, that takes part in the softmax's denominator alone.
    statistics: whether to return statistics of the heads as well.
    compiled: whether torch.compile compiles the call; if None, `choose` asks torch whether it is tracing now.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    compatibility: Compatibility  # without a default: torch.compile cannot trace a module that is a field's default
    mask: Mask | None = None
    start: int | Tensor | None = None
    statistics: bool = False
    compiled: bool | None = None
    modifiers: ScoreModifiers | None = None
    sink: Tensor | None = None

    @property
    def first_position(self) -> int | Tensor:
        """Position of the first query among the keys."""
        return self.key.shape[-2] - self.query.shape[-2] if self.start is None else self.start

    @property
    def softcap(self) -> float | None:
        """The cap on the scores, if there is one."""
        return None if self.modifiers is None else self.modifiers.softcap

    @property
    def alibi(self) -> bool:
        return self.modifiers is not None and self.modifiers.alibi

    @property
    def product_dtype(self) -> torch.dtype:
        """The type in which our kernels multiply: autocast's type if autocast is on, else the query's.

        torch's attention follows the same rule.
        """
        kind = self.query.device.type
        if torch.is_autocast_enabled(kind) and self.query.dtype != torch.float64:
            return torch.get_autocast_dtype(kind)
        return self.query.dtype

    def lowered(self) -> tuple[Tensor, Tensor]:
        """query' (..., H, T, d) and key' (..., G, S, d), whose plain dot product is the score."""
        return self.compatibility.lowered(self.query, self.key)

    def check_shapes(self) -> None:
        """Raise ValueError if shapes do not fit together. The message names these shapes."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if self.compatibility.equal_widths and query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"query and key must have the same width for a dot product, got query {tuple(query.shape)} "
                f"and key {tuple(key.shape)}"
            )
        if key.shape[-2] != value.shape[-2]:
            raise ValueError(f"each key needs one value, got key {tuple(key.shape)} and value {tuple(value.shape)}")
        lead = query.shape[:-2]
        if key.shape[:-2] != value.shape[:-2] or key.ndim != query.ndim or key.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"leading dimensions must be equal, got query {tuple(query.shape)}, key {tuple(key.shape)}, "
                f"value {tuple(value.shape)}"
            )
        if mask is not None and mask.n_leading not in (0, len(lead)):
            raise ValueError(
                f"the mask has {mask.n_leading} leading dimensions and query {tuple(query.shape)} has {len(lead)}: for "
                f"tensors of shape (B, H, T, d), `key_padding` needs lengths of shape (B, 1), and `packed_documents` needs "
                f"documents of shape (B, 1, S)"
            )
        if self.sink is not None and self.sink.shape != lead[-1:]:
            raise ValueError(
                f"the sink needs one logit for each query head, got sink {tuple(self.sink.shape)} and query "
                f"{tuple(query.shape)}"
            )
        if lead and (key.shape[-3] == 0 or lead[-1] % key.shape[-3]):
            raise ValueError(
                f"key/value heads must divide the query heads, got query {tuple(query.shape)} and key {tuple(key.shape)}"
            )


def refusal_of_kernels(case: Case, measures: bool = False) -> str | None:
    """The reason why a fused kernel cannot serve the case, or None. measures: whether the kernel returns statistics."""
    if not case.compatibility.lowers:
        name = type(case.compatibility).__name__
        return f"every fused kernel needs a plain dot product, and {name} has no method `lower` that rewrites it as one"
    if case.statistics and not measures:
        return "it does not return statistics; use triton or reference"
    return None


def refusal_of_start(case: Case) -> str | None:
    """The reason why a kernel that computes ALiBi's distances from an int `start` cannot serve the case, or None."""
    if case.alibi and not isinstance(case.first_position, int):
        return "ALiBi's distances need the position of the first query as an int, and it is a tensor here"
    return None


def refusal_without_cuda(case: Case) -> str | None:
    """The reason why torch's CUDA-only kernels cannot serve the case, or None."""
    if case.query.device.type != "cuda":
        return f"it needs a CUDA GPU, got device={case.query.device.type}"
    return None


def as_batch_of_heads(tensor: Tensor) -> Tensor:
    """(..., H, T, d) -> (B, H, T, d). A missing head or batch dimension becomes a dimension of size 1."""
    while tensor.ndim < 4:
        tensor = tensor[None]
    return tensor.flatten(0, -4)
