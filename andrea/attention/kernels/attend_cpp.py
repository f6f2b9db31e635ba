"""The functions of attend.cpp as differentiable torch operators.

B sequences, H query heads, G key/value heads (G divides H), T queries and T keys, D the width of a head.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from andrea.attention.kernels.sink import sink_gradient
from andrea.runtime.native import COUNT, NUMBER, POINTER, compiled_library

SOURCE = Path(__file__).with_name("attend.cpp")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None without a compiler, or on a processor that does not multiply in bf16."""
    functions = compiled_library(SOURCE)
    if functions is None or not functions.multiplies_bf16():
        return None
    functions.attend_forward.argtypes = [POINTER] * 6 + [COUNT] * 5 + [NUMBER] + [POINTER] * 2
    functions.attend_backward.argtypes = [POINTER] * 10 + [COUNT] * 5 + [NUMBER] + [POINTER]
    functions.attend_forward.restype = functions.attend_backward.restype = None
    return functions


@torch.library.custom_op("andrea::native_attention", mutates_args=())
def native_attention(
    query: Tensor, key: Tensor, value: Tensor, softcap: float, slopes: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal attention in bf16. query (B, H, T, D), key and value (B, G, T, D) -> output (B, H, T, D), and log-sum-exp
    (B, H, T) in fp32. softcap: the cap on scores, or 0. slopes: ALiBi's slopes (H,). sink: the sinks' logits (H,). Both
    are fp32.
    """
    query, key, value = in_rows(query), in_rows(key), in_rows(value)
    output, lse = outputs(query)
    tensors = query, key, value, output
    pointers = *map(Tensor.data_ptr, tensors), lse.data_ptr()
    scoring = softcap, address_of(slopes), address_of(sink)
    library().attend_forward(*pointers, steps_of(*tensors), *shape_of(query, key), *scoring)
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
    gradients = tuple(map(like, (query, key, value)))
    before, after = (query, key, value, output), (d_output, *gradients)
    pointers = *map(Tensor.data_ptr, before), lse.contiguous().data_ptr(), *map(Tensor.data_ptr, after)
    library().attend_backward(*pointers, steps_of(*before, *after), *shape_of(query, key), softcap, address_of(slopes))
    return gradients


@native_attention_backward.register_fake
def _(query, key, value, slopes, output, lse, d_output, softcap) -> tuple[Tensor, Tensor, Tensor]:
    return like(query), like(key), like(value)


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


def like(x: Tensor) -> Tensor:
    """An empty tensor (B, H, T, D) with the memory layout (B, T, H, D), the layout of a model's projections."""
    n_batch, n_head, n_token, d_head = x.shape
    return x.new_empty(n_batch, n_token, n_head, d_head).transpose(1, 2)


def outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    return like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def address_of(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def in_rows(x: Tensor) -> Tensor:
    """The tensor with contiguous rows: a last stride of 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def steps_of(*tensors: Tensor) -> ctypes.Array:
    """The strides of batch, head and token of each tensor, in one array."""
    steps = [step for tensor in tensors for step in tensor.stride()[:3]]
    return (ctypes.c_int64 * len(steps))(*steps)


def shape_of(query: Tensor, key: Tensor) -> tuple[int, ...]:
    n_batch, n_head, n_token, d_head = query.shape
    return n_batch, n_head, key.shape[1], n_token, d_head
