"""How heads lie in tensors: shared keys and values, and flattened leading dimensions."""

from __future__ import annotations

from torch import Tensor


def shared_by_group(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat keys (..., G, S, d) to (..., H, S, d) for query (..., H, T, d): query head h reads key head h // (H / G)."""
    if keys.ndim < 3 or keys.shape[-3] == query.shape[-3]:
        return keys
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], dim=-3)


def as_batch_of_heads(tensor: Tensor) -> Tensor:
    """(..., H, T, d) -> (B, H, T, d). A missing head or batch dimension becomes a dimension of size 1."""
    while tensor.ndim < 4:
        tensor = tensor[None]
    return tensor.flatten(0, -4)
