"""torch's scaled_dot_product_attention on lowered queries and keys, with torch's choice of kernel or a named kernel.

H query heads, G key/value heads (G divides H), T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from andrea.attention.implementations.case import Case, Result, refusal_of_kernels, refusal_without_cuda
from andrea.attention.mask import Causal, positions, visible_keys
from andrea.attention.modifiers import distance_bias

SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def refusal(case: Case, backend: str | None = None) -> str | None:
    """Why torch's kernels cannot serve the case, or None. backend: one of SDPA_BACKENDS; None for torch's own choice."""
    reason = refusal_of_kernels(case) or refusal_of_scores(case)
    if reason is not None or backend is None:
        return reason
    reason = refusal_without_cuda(case)
    if reason is not None:
        return reason
    if backend == "sdpa_flash" and case.alibi:
        return "torch's flash kernel adds no bias to the scores, which ALiBi needs"
    square = case.query.shape[-2] == case.key.shape[-2]
    if backend == "sdpa_flash" and not (case.mask is None or (isinstance(case.mask, Causal) and square)):
        return "torch's flash kernel supports only the causal mask, with equal numbers of queries and keys"
    return None


def refusal_of_scores(case: Case) -> str | None:
    """Why torch's kernels cannot compute the case's scores and softmax, or None. They can add ALiBi's bias."""
    if case.softcap is not None:
        return "torch's kernels do not cap scores"
    return None if case.sink is None else "torch's kernels have no sink in the softmax"


def run(case: Case, backend: str | None = None) -> Result:
    query, key = case.lowered()
    mask, start = case.mask, case.first_position
    n_query, n_key = query.shape[-2], key.shape[-2]
    attend_by = kernel_of(backend)
    options = {"scale": 1.0, "enable_gqa": query.ndim > 2 and query.shape[-3] != key.shape[-3]}
    if case.alibi:
        bias = bias_of(case, query).to(case.product_dtype)
        return without_blind(
            attend_by(query, key, case.value, attn_mask=bias, **options), bias > -torch.inf, backend
        ), None
    if isinstance(mask, Causal) and isinstance(start, int):
        if start == 0 and n_query == n_key:
            return attend_by(query, key, case.value, is_causal=True, **options), None
        if start >= n_key - 1:  # the first query already stands at or after the last key, so every query sees all keys
            mask = None
    visible = None if mask is None else visible_keys(mask, n_query, n_key, start, query.device)
    return without_blind(attend_by(query, key, case.value, attn_mask=visible, **options), visible, backend), None


def without_blind(output: Tensor, visible: Tensor | None, backend: str | None) -> Tensor:
    """The output (..., H, T, d_v) with zeros for queries that see no key. visible: broadcasts to (..., H, T, S).

    cuDNN returns the mean of the values for them (seen on an H200, torch 2.11); torch's other kernels return zeros.
    """
    if visible is None or not output.is_cuda or backend not in (None, "sdpa_cudnn"):
        return output
    return torch.where(visible.any(-1, keepdim=True), output, 0.0)


def bias_of(case: Case, query: Tensor) -> Tensor:
    """What ALiBi adds to the scores, -inf where masked: (..., H, T, S), without H for a query (T, d)."""
    n_query, n_key, device = query.shape[-2], case.key.shape[-2], query.device
    query_position = positions(n_query, case.first_position, device)[..., None]
    n_head = query.shape[-3] if query.ndim > 2 else 1
    bias = distance_bias(n_head, query_position, torch.arange(n_key, device=device), torch.float32)
    if case.mask is None:
        return bias
    return bias.masked_fill(~visible_keys(case.mask, n_query, n_key, case.first_position, device), -torch.inf)


def kernel_of(backend: str | None) -> Callable[..., Tensor]:
    """scaled_dot_product_attention, restricted to one kernel if a backend is named."""
    if backend is None:
        return scaled_dot_product_attention

    def by_backend(*inputs: Tensor, **options) -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return scaled_dot_product_attention(*inputs, **options)

    return by_backend
