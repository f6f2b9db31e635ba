"""Our kernels for CPUs: causal attention and the convolution over tokens in bf16 (kernels/attend.cpp), and plain causal
attention in fp32 (kernels/attend_fp32.cpp).

B sequences, H query heads, G key/value heads (G divides H), T queries and T keys, D the width of a head, K mixed tokens.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from andrea.attention.compatibility import Case, Result, as_batch_of_heads, in_rows, like_heads
from andrea.attention.mask import Causal
from andrea.attention.modifiers import alibi_slopes
from andrea.attention.statistics import sink_gradient
from andrea.runtime.native import COUNT, NUMBER, POINTER, REASONS, compiled_library

KERNELS = Path(__file__).parents[1] / "kernels"
SOURCES = {torch.bfloat16: KERNELS / "attend.cpp", torch.float32: KERNELS / "attend_fp32.cpp"}
D_STEP = 16  # the width of a head must be a multiple of this number
MOST_MIXED = 8


@functools.cache
def library(dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL | None:
    """The compiled functions; None without a compiler, or for bf16 on a processor that does not multiply in bf16."""
    functions, is_bf16 = compiled_library(SOURCES[dtype]), dtype == torch.bfloat16
    if functions is None or (is_bf16 and not functions.multiplies_bf16()):
        return None
    functions.attend_forward.argtypes = [POINTER] * 6 + [COUNT] * 5 + [NUMBER] + [POINTER] * 2
    functions.attend_backward.argtypes = [POINTER] * 10 + [COUNT] * 5 + [NUMBER] + [POINTER]
    functions.attend_forward.restype = functions.attend_backward.restype = None
    if not is_bf16:
        return functions
    functions.convolve_forward.argtypes = [POINTER] * 4 + [COUNT] * 5
    functions.convolve_backward.argtypes = [POINTER] * 6 + [COUNT] * 5
    functions.convolve_forward.restype = functions.convolve_backward.restype = None
    return functions


@torch.compiler.assume_constant_result
def is_measured_in_fp32() -> bool:
    """Whether this is a processor of the kind where the kernel for fp32 was seen to be faster than torch's."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@torch.compiler.assume_constant_result
def reason_without_library(dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why the functions cannot be used on this machine, or None. Compiling them takes a moment the first time."""
    if library(dtype) is not None:
        return None
    return REASONS.get(SOURCES[dtype], "it needs a processor with bf16 instructions (AVX512-BF16)")


def steps_of(*tensors: Tensor) -> ctypes.Array:
    """The strides of batch, head and token of each tensor, in one array."""
    steps = [step for tensor in tensors for step in tensor.stride()[:3]]
    return (ctypes.c_int64 * len(steps))(*steps)


# ------------------------------------------------------------------------------------------------------------ attention


def refusal(case: Case) -> str | None:
    """Why the kernel cannot serve the case, or None."""
    query, key, value = case.query, case.key, case.value
    if query.device.type != "cpu":
        return f"it runs on CPUs only, got device={query.device.type}"
    if case.product_dtype not in SOURCES:
        return f"it computes in bf16 and fp32, got {case.product_dtype}"
    if case.product_dtype == torch.float32 and not (case.modifiers is None and case.sink is None):
        return "in fp32 it computes plain scores only, without a soft cap, ALiBi or sinks"
    if not isinstance(case.mask, Causal):
        return "it supports the causal mask only"
    start = case.first_position
    if query.shape[-2] != key.shape[-2] or not (isinstance(start, int) and start == 0):
        return "it needs equal numbers of queries and keys, both starting at position 0"
    if query.shape[-1] != value.shape[-1] or query.shape[-1] % D_STEP:
        return f"it needs keys and values of equal width, a multiple of {D_STEP}, got {query.shape[-1]} and {value.shape[-1]}"
    return reason_without_library(case.product_dtype)


def run(case: Case) -> Result:
    query, key = case.lowered()
    tensors = (as_batch_of_heads(each.to(case.product_dtype)) for each in (query, key, case.value))
    n_head = query.shape[-3] if query.ndim > 2 else 1
    slopes = alibi_slopes(n_head) if case.alibi else None
    sink = None if case.sink is None else case.sink.float().reshape(-1)
    output, _ = native_attention(*tensors, case.softcap or 0.0, slopes, sink)  # (B, H, T, D)
    return output.reshape(query.shape), None


@torch.library.custom_op("andrea::native_attention", mutates_args=())
def native_attention(
    query: Tensor, key: Tensor, value: Tensor, softcap: float, slopes: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal attention in bf16 or fp32. query (B, H, T, D), key and value (B, G, T, D) -> output (B, H, T, D), and log-sum-exp
    (B, H, T) in fp32. softcap: the cap on scores, or 0. slopes: ALiBi's slopes (H,). sink: the sinks' logits (H,). Both
    are fp32, and for queries in bf16 only.
    """
    query, key, value = in_rows(query), in_rows(key), in_rows(value)
    output, lse = outputs(query)
    tensors = query, key, value, output
    pointers = *map(Tensor.data_ptr, tensors), lse.data_ptr()
    scoring = softcap, None if slopes is None else slopes.data_ptr(), None if sink is None else sink.data_ptr()
    library(query.dtype).attend_forward(*pointers, steps_of(*tensors), *shape_of(query, key), *scoring)
    return output, lse


@native_attention.register_fake
def _(query, key, value, softcap, slopes, sink) -> tuple[Tensor, Tensor]:
    return outputs(query)


@torch.library.custom_op("andrea::native_attention_backward", mutates_args=())
def native_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    output: Tensor,
    lse: Tensor,
    d_output: Tensor,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, d_output = map(in_rows, (query, key, value, output, d_output))
    gradients = tuple(map(like_heads, (query, key, value)))
    before, after = (query, key, value, output), (d_output, *gradients)
    pointers = *map(Tensor.data_ptr, before), lse.contiguous().data_ptr(), *map(Tensor.data_ptr, after)
    shape = shape_of(query, key)
    scoring = softcap, None if slopes is None else slopes.data_ptr()
    library(query.dtype).attend_backward(*pointers, steps_of(*before, *after), *shape, *scoring)
    return gradients


@native_attention_backward.register_fake
def _(query, key, value, slopes, output, lse, d_output, softcap) -> tuple[Tensor, Tensor, Tensor]:
    return like_heads(query), like_heads(key), like_heads(value)


def outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    return like_heads(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def shape_of(query: Tensor, key: Tensor) -> tuple[int, ...]:
    n_batch, n_head, n_token, d_head = query.shape
    return n_batch, n_head, key.shape[1], n_token, d_head


def keep(ctx, inputs, output) -> None:
    query, key, value, ctx.softcap, slopes, sink = inputs
    ctx.save_for_backward(query, key, value, slopes, *output, sink)
    ctx.mark_non_differentiable(output[1])


def differentiate(ctx, d_output: Tensor, _) -> tuple[Tensor | None, ...]:
    *saved, output, lse, sink = ctx.saved_tensors
    gradients = native_attention_backward(*saved, output, lse, d_output, ctx.softcap)
    if sink is None:
        return *gradients, None, None, None
    delta = (output.float() * d_output.float()).sum(-1)
    return *gradients, None, None, sink_gradient(sink, lse, delta)


native_attention.register_autograd(differentiate, setup_context=keep)


# ---------------------------------------------------------------------------------------------------------- convolution


@torch.library.custom_op("andrea::native_convolution", mutates_args=())
def native_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """x (B, H, T, D) bf16, taps (H, D, K) fp32 -> (B, H, T, D) bf16; sums are in fp32."""
    x, taps, y = in_rows(x), taps.contiguous(), like_heads(x)
    tensors = x.data_ptr(), taps.data_ptr(), y.data_ptr()
    library().convolve_forward(*tensors, steps_of(x, y), *x.shape, taps.shape[-1])
    return y


@native_convolution.register_fake
def _(x: Tensor, taps: Tensor) -> Tensor:
    return like_heads(x)


@torch.library.custom_op("andrea::native_convolution_backward", mutates_args=())
def native_convolution_backward(x: Tensor, taps: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    x, taps, d_y = in_rows(x), taps.contiguous(), in_rows(d_y)
    d_x, d_taps = like_heads(x), taps.new_empty(len(x), *taps.shape)
    tensors = x.data_ptr(), taps.data_ptr(), d_y.data_ptr(), d_x.data_ptr(), d_taps.data_ptr()
    library().convolve_backward(*tensors, steps_of(x, d_y, d_x), *x.shape, taps.shape[-1])
    return d_x, d_taps.sum(0)


@native_convolution_backward.register_fake
def _(x: Tensor, taps: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    return like_heads(x), torch.empty_like(taps, memory_format=torch.contiguous_format)


native_convolution.register_autograd(
    lambda ctx, d_y: native_convolution_backward(*ctx.saved_tensors, d_y),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
