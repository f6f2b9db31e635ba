"""The way into our own kernel: lowered queries and keys of any leading shape, our masks, autocast.

B batch, H query heads, G key/value heads, T queries, S keys.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from andrea.attention.mask import Causal, Mask, as_batch_of_heads, visible_interval
from andrea.attention.statistics import AttentionStatistics, statistics_of_pass

WIDEST_HEAD = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Both backward passes are there (kernels/fused.py); which is faster is to be measured on a card by bench/attention.py.
ATOMICS_ARE_FASTER = False


@torch.compiler.assume_constant_result
@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def refusal_of_triton(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> str | None:
    """Why the kernel cannot serve the case, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtype = kernel_dtype(query)
    if not has_triton():
        return "triton is not installed (a CUDA build of torch brings it; else: pip install triton)"
    if query.device.type != "cuda" and not interpreted:
        return f"it needs a CUDA card, got device={query.device.type} (TRITON_INTERPRET=1 runs it slowly anywhere)"
    if dtype not in DTYPES:
        return f"it computes in fp32, fp16 and bf16, got {dtype}"
    if interpreted and dtype == torch.bfloat16:
        return "triton's interpreter computes bf16 wrongly; use fp32 or fp16"
    if max(query.shape[-1], value.shape[-1]) > WIDEST_HEAD:
        return f"its widest head is {WIDEST_HEAD}, got {max(query.shape[-1], value.shape[-1])}"
    if any(tensor.shape[-2] * tensor.stride(-2) >= 2**31 for tensor in (query, key, value)):
        return "the rows of one head lie more than 2^31 numbers apart"
    if mask is not None and not mask.is_interval:
        return f"the mask {type(mask).__name__} does not say which interval of keys a query sees"
    return None


def kernel_errors() -> tuple[type[Exception], ...]:
    """What a kernel that does not fit the card raises."""
    if not has_triton():
        return ()
    from andrea.attention.kernels.fused import KernelError

    return (KernelError,)


def kernel_dtype(query: Tensor) -> torch.dtype:
    """The type the kernel computes in: autocast's where it is on, as torch's own attention does."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return query.dtype


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, start: int | Tensor, statistics: bool
) -> tuple[Tensor, AttentionStatistics | None]:
    """Output (..., T, d_v) and, when asked, each query's statistics, from one pass."""
    from andrea.attention.kernels.fused import fused_attention

    lead, n_query, n_key, device = query.shape[:-2], query.shape[-2], key.shape[-2], query.device
    dtype = kernel_dtype(query)
    causal = isinstance(mask, Causal) and isinstance(start, int)
    first = stop = None
    if mask is not None and not causal:
        interval = visible_interval(mask, n_query, n_key, start, device)
        assert interval is not None, "refused before"
        ends = torch.broadcast_tensors(*interval)
        first, stop = (of_heads(end, lead).to(torch.int32).contiguous() for end in ends)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output, *rows = fused_attention(
        as_batch_of_heads(query),
        as_batch_of_heads(key),
        as_batch_of_heads(value),
        first,
        stop,
        causal,
        start if causal else 0,
        statistics,
        torch.are_deterministic_algorithms_enabled() or not ATOMICS_ARE_FASTER,
    )
    output = output.reshape(*lead, n_query, value.shape[-1])
    if not statistics:
        return output, None
    lse, largest, entropy = (row.detach().reshape(*lead, n_query) for row in rows)
    return output, statistics_of_pass(query, key, mask, start, lse, largest, entropy)


def of_heads(end: Tensor, lead: torch.Size) -> Tensor:
    """One end of the intervals, broadcastable to (..., T), as broadcastable to (B, H, T)."""
    if len(lead) > 2:
        end = end.expand(*lead, end.shape[-1])
    return as_batch_of_heads(end[..., None])[..., 0]
