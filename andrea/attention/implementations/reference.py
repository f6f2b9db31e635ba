"""The oracle: attention as the textbook writes it, every intermediate by name, on any device, through any autograd.

Slow and plain on purpose; every other implementation is judged against it.
T queries, S keys, widths d_k (query, key) and d_v (value), any leading dimensions in front.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention.compatibility import Compatibility
from andrea.attention.mask import Mask, visible_keys

Scores = Callable[[Tensor, Tensor], Tensor]  # query (..., T, d_q), key (..., S, d_k) -> (..., T, S)


@dataclass(frozen=True)
class Intermediates:
    """scores (..., T, S), -inf where masked; weights (..., T, S); output (..., T, d_v)."""

    scores: Tensor
    weights: Tensor
    output: Tensor


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Compatibility,
    mask: Mask | None,
    start: int | Tensor,
    scores_of: Scores | None = None,
) -> Intermediates:
    """output_i = sum_j softmax_j(mask(f(q_i, k_j))) v_j; a query that sees no key retrieves zeros.

    Fewer key than query heads: each is shared by the query heads of its group. scores_of: compatibility.scores unless
    given.
    """
    key, value = shared_by_group(key, query), shared_by_group(value, query)
    scores = (scores_of or compatibility.scores)(query, key)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        visible = visible_keys(mask, query.shape[-2], key.shape[-2], start, query.device)
        nothing_visible = ~visible.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~visible, -torch.inf)
        # A row of -inf only would give NaN, in the gradient too: it enters the softmax as zeros and leaves it as zeros.
        weights = scores.masked_fill(nothing_visible, 0).softmax(dim=-1).masked_fill(nothing_visible, 0)
    return Intermediates(scores, weights, weights.to(value.dtype) @ value)


def shared_by_group(keys: Tensor, query: Tensor) -> Tensor:
    """keys (..., G, S, d) -> (..., H, S, d): query head h reads key head h // (H / G)."""
    if keys.ndim < 3 or keys.shape[-3] == query.shape[-3]:
        return keys
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], dim=-3)
