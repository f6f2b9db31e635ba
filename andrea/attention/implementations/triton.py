"""Our Triton kernel (kernels/attend_triton.py). It supports every mask that defines `interval`, and returns statistics.

B batch, H query heads, G key/value heads (G divides H), T queries, S keys.
"""

import importlib.util
import os

import torch
from torch import Tensor

from andrea.attention.compatibility import Case, Result, as_batch_of_heads, refusal_of_triton
from andrea.attention.grouped_query import repeated_for_query_heads
from andrea.attention.mask import Causal, positions, visible_interval
from andrea.attention.modifiers import alibi_slopes
from andrea.attention.statistics import AttentionStatistics, sees, sink_mass_of
from andrea.runtime.device import AMPERE, capability_of

WIDEST_HEAD = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HAS_TRITON = importlib.util.find_spec("triton") is not None  # a constant: torch.compile warns about a cached function


def runs_on(device: torch.device) -> bool:
    """Whether our Triton kernels run on the device. On a CPU only tests run them, interpreted."""
    return device.type == "cuda" and HAS_TRITON and capability_of(device) >= AMPERE


def refusal(case: Case) -> str | None:
    """Why the kernel cannot serve the case, or None."""
    reason = refusal_of_triton(case)
    if reason is not None:
        return reason
    query, key, value, mask = case.query, case.key, case.value, case.mask
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not HAS_TRITON:
        return "triton is not installed (a CUDA build of torch includes it; otherwise run: pip install triton)"
    if query.device.type != "cuda" and not interpreted:
        return f"it needs a CUDA GPU, got device={query.device.type} (TRITON_INTERPRET=1 runs it slowly on any device)"
    if case.product_dtype not in DTYPES:
        return f"it computes in fp32, fp16 and bf16, got {case.product_dtype}"
    if interpreted and case.product_dtype == torch.bfloat16:
        return "triton's interpreter computes bf16 wrongly; use fp32 or fp16"
    if query.shape[-2] == key.shape[-2] == 1 and not interpreted:
        return "the assembler of triton 3.6 crashes on one query with one key"
    if max(query.shape[-1], value.shape[-1]) > WIDEST_HEAD:
        return f"its largest head width is {WIDEST_HEAD}, got {max(query.shape[-1], value.shape[-1])}"
    if any(rows * stride >= 2**31 for rows, stride in row_strides(query, key, value)):
        return "the rows of one head span 2^31 elements or more in memory"
    if mask is not None and not mask.is_interval:
        return f"the mask {type(mask).__name__} does not say which interval of keys a query sees"
    return None


def row_strides(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[int, int]]:
    """(rows, elements from one row to the next) of all that the kernels read and write with 32-bit offsets.

    The output and the gradients are laid out as (B, rows, heads, D), whatever the layout of the inputs.
    """
    inputs = [(tensor.shape[-2], tensor.stride(-2)) for tensor in (query, key, value)]
    n_head, n_group = (tensor.shape[-3] if tensor.ndim > 2 else 1 for tensor in (query, key))
    written = [(query.shape[-2], n_head * tensor.shape[-1]) for tensor in (query, value)]  # dQ, and the output
    return inputs + written + [(tensor.shape[-2], n_group * tensor.shape[-1]) for tensor in (key, value)]


def kernel_errors() -> tuple[type[Exception], ...]:
    """The exceptions raised when a kernel does not compile or does not fit the GPU."""
    if not HAS_TRITON:
        return ()
    from andrea.attention.kernels.attend_triton import KernelError

    return (KernelError,)


def run(case: Case) -> Result:
    from andrea.attention.kernels.attend_triton import fused_attention, query_ranges

    query, key = case.lowered()
    mask, start = case.mask, case.first_position
    lead, n_query, n_key = query.shape[:-2], query.shape[-2], key.shape[-2]
    causal = isinstance(mask, Causal) and isinstance(start, int)
    first = stop = ranges = None
    if mask is not None and not causal:
        interval = visible_interval(mask, n_query, n_key, start, query.device)
        assert interval is not None, "a mask without an interval is refused"
        ends = torch.broadcast_tensors(*interval)
        first, stop = (of_heads(end, lead).to(torch.int32).contiguous() for end in ends)
    query, key, value = (each.to(case.product_dtype) for each in (query, key, case.value))
    tensors = [as_batch_of_heads(each) for each in (query, key, value)]
    if first is not None and torch.is_grad_enabled():  # here, so that torch.compile computes them once for all layers
        ranges = query_ranges(tensors[0], tensors[2], first, stop)
    output, *rows = fused_attention(
        *tensors,
        first,
        stop,
        ranges,
        causal,
        start if isinstance(start, int) else 0,
        case.softcap or 0.0,
        alibi_slopes(query.shape[-3] if lead else 1, query.device) if case.alibi else None,
        None if case.sink is None else case.sink.float().reshape(-1),
        case.statistics,
    )
    output = output.reshape(*lead, n_query, value.shape[-1])
    if not case.statistics:
        return output, None
    log_sum_exp, largest, entropy = (row.detach().reshape(*lead, n_query) for row in rows)
    return output, statistics_of(case, query.detach(), key.detach(), log_sum_exp, largest, entropy)


def statistics_of(
    case: Case, query: Tensor, key: Tensor, log_sum_exp: Tensor, largest_logit: Tensor, entropy_nats: Tensor
) -> AttentionStatistics:
    """The kernel's values, (..., H, T) each, and the weights of the first and the previous key.

    query (..., H, T, d) and key (..., G, S, d) are lowered.
    """
    mask, start, n_query, n_key = case.mask, case.first_position, query.shape[-2], key.shape[-2]
    key, position = repeated_for_query_heads(key, query), positions(n_query, start, query.device)
    before = key.gather(-2, (position - 1).clamp(0, n_key - 1)[..., None].expand_as(query))

    def mass(of_key: Tensor, key_position: Tensor) -> Tensor:
        """The weight p = e^(score - log-sum-exp) of one key for each query. key_position: (T,), or (B, 1, T)."""
        scores = (query.float() * of_key.float()).sum(-1, keepdim=True)
        if case.modifiers is not None:
            scores = case.modifiers.modified(scores, position[..., None], key_position[..., None])
        weight = (scores[..., 0] - log_sum_exp).exp()
        return torch.where(sees(mask, key_position, position, n_key), weight, 0)

    first, stop = visible_interval(mask, n_query, n_key, start, query.device)
    return AttentionStatistics(
        log_sum_exp,
        largest_logit,
        entropy_nats,
        first_token_mass=mass(key[..., :1, :], torch.zeros_like(position)),
        previous_token_mass=mass(before, position - 1),
        visible_keys=(stop - first).clamp(min=0),
        sink_mass=None if case.sink is None else sink_mass_of(log_sum_exp, case.sink),
    )


def of_heads(end: Tensor, lead: torch.Size) -> Tensor:
    """Reshape `end`, one number per query that broadcasts to (*lead, T), so that it broadcasts to (B, H, T)."""
    if len(lead) > 2:
        end = end.expand(*lead, end.shape[-1])
    return as_batch_of_heads(end[..., None])[..., 0]
