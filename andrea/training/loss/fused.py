"""-ln p(target) from hidden vectors without ever holding all logits: head, soft cap and cross-entropy in one.

N tokens, d = d_model, V vocabulary. A chunk of rows at a time becomes logits, their loss and, while they are there, their
gradient, which is multiplied out at once: what stays are the gradients of hidden (N, d) and of the head (V, d), which the
backward pass only scales. The readable twin is `andrea.training.loss.loss.score`. (The idea is Liger's: Hsu et al. 2024,
arXiv 2410.10989, section 3.2.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from andrea.attention.implementations.triton import has_triton
from andrea.model.layers import softcap
from andrea.text.loader import IGNORED_TARGET

# Logits in a chunk. Fewer mean more passes over the head's gradient, which every chunk adds to; more mean more memory. Our
# kernel needs them once, in the precision of the products; compiled code twice; eager code five times in fp32.
LOGITS_IN_KERNEL, LOGITS_COMPILED, LOGITS_EAGER = 1 << 27, 1 << 26, 1 << 24


def fused_nats(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype) -> Tensor:
    """Sum over all targets of -ln softmax(cap(hidden · weightᵀ))[target], in nats, fp32 scalar.

    hidden (..., d), weight (V, d), targets (...) int64, IGNORED_TARGET where nothing is to be predicted; cap: the soft cap, or
    None. Products are in `dtype`, fp32 or bf16; all else, and the gradient of the head, in fp32. fp16 would lose the small
    gradients, which no loss scale has multiplied yet.
    """
    assert dtype != torch.float16, "fp16 gradients need the loss scale: use the readable path"
    rows, answers = hidden.flatten(0, -2), targets.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return FusedNats.apply(rows, weight, answers, cap, dtype)
    return over_chunks(rows, weight, answers, cap, dtype, gradients=False)[0]


class FusedNats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype
    ) -> Tensor:
        nats, d_rows, d_weight = over_chunks(rows, weight, targets, cap, dtype, gradients=True)
        ctx.save_for_backward(d_rows, d_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, d_nats: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_rows, d_weight = ctx.saved_tensors
        return (d_nats * d_rows).to(ctx.dtypes[0]), (d_nats * d_weight).to(ctx.dtypes[1]), None, None, None


def over_chunks(
    rows: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """rows (N, d) -> nats, and with `gradients` those of rows (N, d) and weight (V, d), of a loss of 1 · nats."""
    in_kernel = rows.is_cuda and has_triton()
    n_logit = LOGITS_IN_KERNEL if in_kernel else LOGITS_COMPILED if torch.compiler.is_compiling() else LOGITS_EAGER
    n_row = rows_in_chunk(len(rows), len(weight), n_logit)
    rows, weight = rows.to(dtype), weight.to(dtype)
    nats, d_rows, d_weight = torch.zeros((), device=rows.device), [], None
    for chunk, answers in zip(rows.split(n_row), targets.split(n_row), strict=True):
        logits = chunk @ weight.mT
        of_chunk, d_logits = (by_kernel if in_kernel else by_torch)(logits, answers, cap, gradients)
        nats = nats + of_chunk
        if gradients:
            d_rows.append(d_logits @ weight)
            d_head = (d_logits.mT @ chunk).float()
            d_weight = d_head if d_weight is None else d_weight.add_(d_head)
    return nats, torch.cat(d_rows) if gradients else None, d_weight


def rows_in_chunk(n_row: int, n_vocab: int, n_logit: int) -> int:
    """So that chunks have about n_logit logits and are of one size: a small last one would cost as much as the others."""
    n_chunk = -(-n_row * n_vocab // n_logit)
    return -(-n_row // max(1, min(n_chunk, n_row)))


def by_torch(logits: Tensor, targets: Tensor, cap: float | None, gradients: bool) -> tuple[Tensor, Tensor | None]:
    """logits (n, V) -> the chunk's nats, and the gradient (n, V) in the logits' precision; torch.compile fuses it."""
    z = logits.float() if cap is None else softcap(logits, cap)
    counted = targets != IGNORED_TARGET
    log_sum_exp = z.logsumexp(1)
    of_target = z.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    nats = torch.where(counted, log_sum_exp - of_target, 0.0).sum()
    if not gradients:
        return nats, None
    is_target = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    d_z = (z - log_sum_exp[:, None]).exp() - is_target.float()
    if cap is not None:
        d_z = d_z * (1 - (z / cap).square())  # the derivative of cap · tanh(x / cap)
    return nats, torch.where(counted[:, None], d_z, 0.0).to(logits.dtype)


def by_kernel(logits: Tensor, targets: Tensor, cap: float | None, gradients: bool) -> tuple[Tensor, Tensor | None]:
    """The same by our Triton kernel, the gradient written in the logits' place."""
    from andrea.training.loss.kernels.nats import nats_of_rows

    return nats_of_rows(logits, targets, cap or 0.0, gradients).sum(), logits if gradients else None
