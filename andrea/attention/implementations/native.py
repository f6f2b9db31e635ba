"""The way into our kernel for CPUs: lowered queries and keys of any leading shape, the causal mask, autocast.

T queries and as many keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from andrea.attention.implementations.triton import kernel_dtype
from andrea.attention.kernels.native import library, native_attention
from andrea.attention.mask import Causal, Mask, as_batch_of_heads

D_STEP = 16  # a head's width is a multiple of it


def refusal_of_native(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, start: int | Tensor | None
) -> str | None:
    """Why the kernel cannot serve the case, or None."""
    if query.device.type != "cpu":
        return f"it is made for CPUs, got device={query.device.type}"
    if kernel_dtype(query) != torch.bfloat16:
        return f"it computes in bf16, got {kernel_dtype(query)}"
    if not isinstance(mask, Causal):
        return "it knows the causal mask alone"
    if query.shape[-2] != key.shape[-2] or not (start is None or (isinstance(start, int) and start == 0)):
        return "it takes as many queries as keys, from the first on"
    if query.shape[-1] != value.shape[-1] or query.shape[-1] % D_STEP:
        return f"it takes heads of one width, a multiple of {D_STEP}, got {query.shape[-1]} and {value.shape[-1]}"
    if not has_native():
        return "it needs g++ and a processor that multiplies in bf16 (AVX512-BF16)"
    return None


@torch.compiler.assume_constant_result
def has_native() -> bool:
    return library() is not None


def attend_native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query (..., H, T, D), key and value (..., G, T, D) -> output (..., H, T, D)."""
    lead, shape = query.shape[:-2], query.shape[-2:]
    tensors = (as_batch_of_heads(each.to(kernel_dtype(query))) for each in (query, key, value))
    return native_attention(*tensors)[0].reshape(*lead, *shape)
