"""Key/value heads that several query heads share (Ainslie et al. 2023, arXiv 2305.13245).

H query heads, G key/value heads (G divides H), T queries, S keys, d width of a head.
"""

from __future__ import annotations

from torch import Tensor


def shared_by_group(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat keys (..., G, S, d) to (..., H, S, d) for query (..., H, T, d): query head h reads key head h // (H / G)."""
    if keys.ndim < 3 or keys.shape[-3] == query.shape[-3]:
        return keys
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], dim=-3)
