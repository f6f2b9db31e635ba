"""The gradient of an attention sink, which every fused kernel leaves to torch. B batch, H heads, T queries."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_gradient(sink: Tensor, log_sum_exp: Tensor, delta: Tensor) -> Tensor:
    """sink (H,), log_sum_exp and delta (B, H, T), fp32 -> the gradient of the sink (H,).

    A sink has no value, so the softmax's gradient p (dp - delta) is -p delta for it; delta is defined in attend_triton.py.
    Terms of both signs are summed over all queries, in fp64, so that the sum adds no error to that of its terms.
    """
    weight = torch.where(log_sum_exp == -torch.inf, 0, (sink[:, None] - log_sum_exp).exp())
    return -(weight * delta).double().sum((0, 2)).to(sink.dtype)
