"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): each of G key/value heads serves H / G query heads.

Kernels read the shared head in place; what has no kernel repeats the heads with this function.
"""

from torch import Tensor


def repeated_for_query_heads(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat keys (..., G, S, d) to (..., H, S, d) for query (..., H, T, d): query head h reads key head h // (H / G)."""
    if keys.ndim < 3 or keys.shape[-3] == query.shape[-3]:
        return keys
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], dim=-3)
