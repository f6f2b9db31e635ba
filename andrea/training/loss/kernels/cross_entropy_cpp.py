"""The function of cross_entropy.cpp as a torch operator: the nats of rows of bf16 logits, which it can overwrite with their
gradient. n rows, V vocabulary."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from andrea.runtime.native import COUNT, NUMBER, POINTER, compiled_library
from andrea.text.loader import IGNORED_TARGET

SOURCE = Path(__file__).with_name("cross_entropy.cpp")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled function; None without a compiler, or on a processor without bf16 instructions."""
    functions = compiled_library(SOURCE)
    if functions is None or not functions.has_bf16():
        return None
    functions.cross_entropy.argtypes = [POINTER] * 3 + [COUNT] * 3 + [NUMBER, COUNT]
    functions.cross_entropy.restype = None
    return functions


@torch.compiler.assume_constant_result
def has_library() -> bool:
    """Whether the kernel can be used on this machine. Compiling it takes a moment the first time."""
    return library() is not None


def serves(logits: Tensor) -> bool:
    """Whether the kernel can be used for these logits. Not in a memory plan, which stands for other devices too."""
    is_planned = isinstance(logits, FakeTensor) and not torch.compiler.is_compiling()
    return logits.device.type == "cpu" and logits.dtype == torch.bfloat16 and not is_planned and has_library()


@torch.library.custom_op("andrea::native_cross_entropy", mutates_args=("logits",))
def native_cross_entropy(logits: Tensor, targets: Tensor, cap: float, gradients: bool) -> Tensor:
    """logits (n, V) bf16, targets (n,) int64 -> nats (n,) fp32, 0 where the target is IGNORED_TARGET.

    cap: of the soft cap, or 0. gradients: overwrite the logits with the gradient of the sum of the nats.
    """
    assert logits.is_contiguous() and targets.is_contiguous()
    if not ((targets == IGNORED_TARGET) | ((targets >= 0) & (targets < logits.shape[1]))).all():
        raise IndexError(f"a target is no token of a vocabulary of {logits.shape[1]}")  # it would be an address
    nats = logits.new_empty(len(logits), dtype=torch.float32)
    tensors = logits.data_ptr(), targets.data_ptr(), nats.data_ptr()
    library().cross_entropy(*tensors, *logits.shape, IGNORED_TARGET, cap, gradients)
    return nats


@native_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, cap: float, gradients: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
