"""torch's scaled_dot_product_attention on lowered queries and keys, with torch's choice of kernel or a named kernel.

H query heads, G key/value heads (G divides H), T queries, S keys.
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from andrea.attention.compatibility import Case, Result
from andrea.attention.mask import Causal, positions, visible_keys
from andrea.attention.modifiers import distance_bias

SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def refusal(case: Case, backend: str | None = None) -> str | None:
    """Why torch's kernels cannot serve the case, or None. backend: one of SDPA_BACKENDS; None for torch's own choice."""
    if case.softcap is not None:
        return "torch's kernels do not cap scores"
    if case.sink is not None:
        return "torch's kernels have no sink in the softmax"
    if backend is None:
        return None
    if case.query.device.type != "cuda":
        return f"it needs a CUDA GPU, got device={case.query.device.type}"
    if backend == "sdpa_flash" and case.alibi:
        return "torch's flash kernel adds no bias to the scores, which ALiBi needs"
    square = case.query.shape[-2] == case.key.shape[-2]
    if backend == "sdpa_flash" and not (case.mask is None or (isinstance(case.mask, Causal) and square)):
        return "torch's flash kernel supports only the causal mask, with equal numbers of queries and keys"
    return None


def run(case: Case, backend: str | None = None) -> Result:
    query, key = case.lowered()
    mask, start = case.mask, case.first_position
    n_query, n_key = query.shape[-2], key.shape[-2]
    options = {"scale": 1.0, "enable_gqa": query.ndim > 2 and query.shape[-3] != key.shape[-3]}
    is_causal, visible = isinstance(mask, Causal) and isinstance(start, int), None
    if case.alibi:
        options["attn_mask"] = bias = bias_of(case, query).to(case.product_dtype)
        visible = bias > -torch.inf
    elif is_causal and start == 0 and n_query == n_key:
        options["is_causal"] = True
    elif mask is not None and not (is_causal and start >= n_key - 1):  # from there on, every query sees all keys
        options["attn_mask"] = visible = visible_keys(mask, n_query, n_key, start, query.device)
    with nullcontext() if backend is None else sdpa_kernel(SDPA_BACKENDS[backend]):
        output = scaled_dot_product_attention(query, key, case.value, **options)
    if visible is not None and output.is_cuda and backend in (None, "sdpa_cudnn"):
        # For queries that see no key, cuDNN returns the mean of the values (seen on an H200, torch 2.11), others zeros.
        output = torch.where(visible.any(-1, keepdim=True), output, 0.0)
    return output, None


def bias_of(case: Case, query: Tensor) -> Tensor:
    """What ALiBi adds to the scores, -inf where masked: (..., H, T, S), without H for a query (T, d)."""
    n_query, n_key, device = query.shape[-2], case.key.shape[-2], query.device
    query_position = positions(n_query, case.first_position, device)[..., None]
    n_head = query.shape[-3] if query.ndim > 2 else 1
    bias = distance_bias(n_head, query_position, torch.arange(n_key, device=device), torch.float32)
    if case.mask is None:
        return bias
    return bias.masked_fill(~visible_keys(case.mask, n_query, n_key, case.first_position, device), -torch.inf)
