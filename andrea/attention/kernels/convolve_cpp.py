"""The functions of convolve.cpp as a differentiable torch operator.

B sequences, H heads, T tokens, D the width of a head, K mixed tokens.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from andrea.attention.kernels.attend_cpp import in_rows, like, steps_of
from andrea.runtime.native import COUNT, POINTER, compiled_library

SOURCE = Path(__file__).with_name("convolve.cpp")
D_STEP = 16  # the width of a head must be a multiple of this number
MOST_MIXED = 8


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None without a compiler, or on a processor without bf16 instructions."""
    functions = compiled_library(SOURCE)
    if functions is None or not functions.has_bf16():
        return None
    functions.convolve_forward.argtypes = [POINTER] * 4 + [COUNT] * 5
    functions.convolve_backward.argtypes = [POINTER] * 6 + [COUNT] * 5
    functions.convolve_forward.restype = functions.convolve_backward.restype = None
    return functions


@torch.compiler.assume_constant_result
def has_library() -> bool:
    """Whether the kernel can be used on this machine. Compiling it takes a moment the first time."""
    return library() is not None


def serves(x: Tensor, n_mixed: int) -> bool:
    """Whether the kernel can convolve x (B, H, T, D)."""
    is_bf16 = x.device.type == "cpu" and x.dtype == torch.bfloat16
    return is_bf16 and x.shape[-1] % D_STEP == 0 and n_mixed <= MOST_MIXED and has_library()


@torch.library.custom_op("andrea::native_convolution", mutates_args=())
def native_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """x (B, H, T, D) bf16, taps (H, D, K) fp32 -> (B, H, T, D) bf16; sums are in fp32."""
    x, taps, y = in_rows(x), taps.contiguous(), like(x)
    tensors = x.data_ptr(), taps.data_ptr(), y.data_ptr()
    library().convolve_forward(*tensors, steps_of(x, y), *x.shape, taps.shape[-1])
    return y


@native_convolution.register_fake
def _(x: Tensor, taps: Tensor) -> Tensor:
    return like(x)


@torch.library.custom_op("andrea::native_convolution_backward", mutates_args=())
def native_convolution_backward(x: Tensor, taps: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    x, taps, d_y = in_rows(x), taps.contiguous(), in_rows(d_y)
    d_x, d_taps = like(x), taps.new_empty(len(x), *taps.shape)
    tensors = x.data_ptr(), taps.data_ptr(), d_y.data_ptr(), d_x.data_ptr(), d_taps.data_ptr()
    library().convolve_backward(*tensors, steps_of(x, d_y, d_x), *x.shape, taps.shape[-1])
    return d_x, d_taps.sum(0)


@native_convolution_backward.register_fake
def _(x: Tensor, taps: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    return like(x), torch.empty_like(taps, memory_format=torch.contiguous_format)


def keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def differentiate(ctx, d_y: Tensor) -> tuple[Tensor, Tensor]:
    return native_convolution_backward(*ctx.saved_tensors, d_y)


native_convolution.register_autograd(differentiate, setup_context=keep)
