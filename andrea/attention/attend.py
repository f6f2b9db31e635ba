"""The public function: check, choose an implementation, attend.

T queries, S keys, widths d_k (query, key) and d_v (value), any leading dimensions in front.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from andrea.attention.compatibility import Compatibility, ScaledDotProduct
from andrea.attention.mask import Causal, Mask, visible_keys
from andrea.attention.reference import attend_reference

SCALED_DOT_PRODUCT = ScaledDotProduct()
# Up to so many keys torch.compile's code for the written-out form trains faster on a CPU than the fused kernel does.
WRITTEN_OUT_KEYS = 512


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    start: int | Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """query (..., T, d_k), key (..., S, d_k), value (..., S, d_v) -> output (..., T, d_v).

    start: where the first query stands among the keys; S - T when left out. A 0-d integer tensor lets one compiled
    graph serve every position of a preallocated cache.
    implementation: auto, sdpa (torch's fused kernels) or reference; what is named runs, or a ValueError says why not.
    """
    check_shapes(query, key, value)
    name, _ = choose(implementation, query, key)
    start = key.shape[-2] - query.shape[-2] if start is None else start
    if name == "reference":
        return attend_reference(query, key, value, compatibility, mask, start).output
    return attend_sdpa(*compatibility.lower(query, key), value, mask, start)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    start: int | Tensor | None = None,
) -> Tensor:
    """weights (..., T, S), fp32 or higher: how much of each value a query retrieves. Always the reference path."""
    check_shapes(query, key, key)
    start = key.shape[-2] - query.shape[-2] if start is None else start
    return attend_reference(query, key, key, compatibility, mask, start).weights


def choose(implementation: str, query: Tensor, key: Tensor) -> tuple[str, str]:
    """The implementation that will run, and why in a few words."""
    if implementation == "auto":
        compiled_for_cpu = torch.compiler.is_compiling() and query.device.type == "cpu"
        if compiled_for_cpu and query.requires_grad and key.shape[-2] <= WRITTEN_OUT_KEYS:
            return "reference", f"training compiled for a CPU, with at most {WRITTEN_OUT_KEYS} keys"
        return "sdpa", "torch's fused kernels serve every compatibility function that lowers"
    if implementation in ("sdpa", "reference"):
        return implementation, "asked for by name"
    raise ValueError(f"implementation={implementation!r} is unknown; allowed: auto, sdpa, reference")


def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, start: int | Tensor) -> Tensor:
    """Plain dot-product attention by torch's fused kernels; query and key are lowered already."""
    n_query, n_key = query.shape[-2], key.shape[-2]
    if isinstance(mask, Causal) and isinstance(start, int):
        if start == 0 and n_query == n_key:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
        if start >= n_key - 1:  # even the first query stands at or after the last key
            mask = None
    visible = None if mask is None else visible_keys(mask, n_query, n_key, start, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=1.0)


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same width for a dot product, got query {tuple(query.shape)} "
            f"and key {tuple(key.shape)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"each key needs one value, got key {tuple(key.shape)} and value {tuple(value.shape)}")
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            f"leading dimensions must be equal, got query {tuple(query.shape)}, key {tuple(key.shape)}, "
            f"value {tuple(value.shape)}"
        )
