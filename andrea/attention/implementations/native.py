"""Our kernel for CPUs (kernels/attend.cpp): causal attention in bf16, forward and backward, modifiers and sink included.

H query heads, G key/value heads (G divides H), T queries and T keys, D the width of a head.
"""

from __future__ import annotations

import torch

from andrea.attention.implementations.case import Case, Result, as_batch_of_heads, refusal_of_kernels
from andrea.attention.kernels.attend_cpp import D_STEP, native_attention, reason_without_library
from andrea.attention.mask import Causal
from andrea.attention.modifiers import alibi_slopes


def refusal(case: Case) -> str | None:
    """Why the kernel cannot serve the case, or None."""
    reason = refusal_of_kernels(case)
    if reason is not None:
        return reason
    query, key, value = case.query, case.key, case.value
    if query.device.type != "cpu":
        return f"it runs on CPUs only, got device={query.device.type}"
    if case.product_dtype != torch.bfloat16:
        return f"it computes in bf16, got {case.product_dtype}"
    if not isinstance(case.mask, Causal):
        return "it supports the causal mask only"
    start = case.first_position
    if query.shape[-2] != key.shape[-2] or not (isinstance(start, int) and start == 0):
        return "it needs equal numbers of queries and keys, both starting at position 0"
    if query.shape[-1] != value.shape[-1] or query.shape[-1] % D_STEP:
        return f"it needs keys and values of equal width, a multiple of {D_STEP}, got {query.shape[-1]} and {value.shape[-1]}"
    return reason_without_library()


def run(case: Case) -> Result:
    query, key = case.lowered()
    tensors = (as_batch_of_heads(each.to(case.product_dtype)) for each in (query, key, case.value))
    n_head = query.shape[-3] if query.ndim > 2 else 1
    slopes = alibi_slopes(n_head) if case.alibi else None
    sink = None if case.sink is None else case.sink.float().reshape(-1)
    output, _ = native_attention(*tensors, case.softcap or 0.0, slopes, sink)  # (B, H, T, D)
    return output.reshape(query.shape), None
