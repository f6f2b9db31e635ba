"""Grouped-query attention: each key/value head serves several query heads."""

from torch import Tensor


def shared_by_group(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat keys (..., G, S, d) to (..., H, S, d) for query (..., H, T, d): query head h reads key head h // (H / G).

    Each of the G key/value heads serves H / G query heads (Ainslie et al. 2023, arXiv 2305.13245).
    """
    if keys.ndim < 3 or keys.shape[-3] == query.shape[-3]:
        return keys
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], dim=-3)
