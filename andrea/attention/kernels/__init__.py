"""Our attention kernels in Triton and C++: tensors in, tensors out. Here is what both kinds share.

The Triton kernels are imported when first needed, because triton is optional. B batch, H heads, T queries, D head width.
"""

from __future__ import annotations

from torch import Tensor

from andrea.attention.statistics import sink_mass_of


def as_batch_of_heads(tensor: Tensor) -> Tensor:
    """(..., H, T, d) -> (B, H, T, d). A missing head or batch dimension becomes a dimension of size 1."""
    while tensor.ndim < 4:
        tensor = tensor[None]
    return tensor.flatten(0, -4)


def in_rows(x: Tensor) -> Tensor:
    """The tensor with contiguous rows, which the kernels require: a last stride of 1. The other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like_heads(x: Tensor, width: int | None = None) -> Tensor:
    """An empty tensor (B, H, T, D) with the memory layout (B, T, H, D), which the output projection reads without a copy.

    x: (B, H, T, any width), of the same type. width: D; that of x if None.
    """
    n_batch, n_head, n_token, d_head = x.shape
    return x.new_empty(n_batch, n_token, n_head, d_head if width is None else width).transpose(1, 2)


def sink_gradient(sink: Tensor, log_sum_exp: Tensor, delta: Tensor) -> Tensor:
    """sink (H,), log_sum_exp and delta (B, H, T), fp32 -> the gradient of the sink (H,).

    A sink has no value, so the softmax's gradient p (dp - delta) is -p delta for it; delta is defined in attend_triton.py.
    Terms of both signs are summed over all queries, in fp64, so that the sum adds no error to that of its terms.
    """
    return -(sink_mass_of(log_sum_exp, sink) * delta).double().sum((0, 2)).to(sink.dtype)
