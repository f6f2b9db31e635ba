"""Fuses head, soft cap and cross-entropy, so that the full logits are never in memory.

N tokens, d = d_model, V vocabulary. Rows are processed in chunks. Each chunk computes its logits, their loss and their
gradient. This gradient is multiplied at once into the gradients of hidden (N, d) and of the head (V, d), so that only
these two are kept. The backward pass scales them. The readable twin is
`andrea.training.loss.micro_batch.loss_sum_from_hidden`. The idea is from Liger Kernel (Hsu et al. 2024,
arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from andrea.attention.implementations.triton import HAS_TRITON
from andrea.text.loader import IGNORED_TARGET
from andrea.training.loss.kernels import cross_entropy_cpp

# Logits in a chunk. Smaller chunks add to the head's gradient more often; larger ones need more memory. The Triton kernel
# holds one copy of the logits, in the precision of the products. Compiled code holds two; eager code holds five, in
# fp32.
LOGITS_IN_KERNEL, LOGITS_COMPILED, LOGITS_EAGER = 1 << 27, 1 << 26, 1 << 24
# With the kernel, the vocabulary is padded and chunks have whole tiles of rows. With an odd number of columns (GPT-2 has
# 50,257), rows of logits would begin at addresses from which a GPU can read only two bytes at a time.
VOCABULARY_MULTIPLE, ROW_MULTIPLE = 128, 128


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype
) -> Tensor:
    """Sum over all targets of -ln softmax(cap(hidden · weightᵀ))[target], in nats, fp32 scalar.

    hidden (..., d), weight (V, d), targets (...) int64, IGNORED_TARGET where nothing is to be predicted. cap: the soft
    cap, or None. dtype: the type of the matrix products, fp32 or bf16; everything else, and the gradient of the head,
    is fp32. fp16 is not allowed: its small gradients would vanish, because the loss scale is applied after this
    function.
    """
    assert dtype != torch.float16, "fp16 gradients need the loss scale: use loss_sum_from_hidden"
    rows, row_targets = hidden.flatten(0, -2), targets.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return FusedCrossEntropy.apply(rows, weight, row_targets, cap, dtype)
    return cross_entropy_in_chunks(rows, weight, row_targets, cap, dtype, gradients=False)[0]


class FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype
    ) -> Tensor:
        nats, d_rows, d_weight = cross_entropy_in_chunks(rows, weight, targets, cap, dtype, gradients=True)
        ctx.save_for_backward(d_rows, d_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, d_nats: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_rows, d_weight = ctx.saved_tensors
        return (d_nats * d_rows).to(ctx.dtypes[0]), (d_nats * d_weight).to(ctx.dtypes[1]), None, None, None


def cross_entropy_in_chunks(
    rows: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype, gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of nats and, with `gradients`, its gradients with respect to rows (N, d) and weight (V, d)."""
    in_kernel = uses_kernel(rows)
    n_logit = LOGITS_IN_KERNEL if in_kernel else LOGITS_COMPILED if torch.compiler.is_compiling() else LOGITS_EAGER
    n_vocab = len(weight)
    rows, weight = rows.to(dtype), weight.to(dtype)
    if in_kernel:
        weight = with_zero_rows(weight, rounded_up(n_vocab, VOCABULARY_MULTIPLE))
    n_row = rows_in_chunk(len(rows), len(weight), n_logit, ROW_MULTIPLE if in_kernel else 1)
    nats, d_rows, d_weight = torch.zeros((), device=rows.device), [], None
    for chunk, chunk_targets in zip(rows.split(n_row), targets.split(n_row), strict=True):
        logits = chunk @ weight.mT
        is_native = not in_kernel and cross_entropy_cpp.serves(logits)
        loss_of_chunk = (
            triton_loss_of_chunk if in_kernel else native_loss_of_chunk if is_native else torch_loss_of_chunk
        )
        chunk_nats, d_logits = loss_of_chunk(logits, chunk_targets, n_vocab, cap, gradients)
        nats = nats + chunk_nats
        if gradients:
            d_rows.append(d_logits @ weight)
            d_head = (d_logits.mT @ chunk).float()
            d_weight = d_head if d_weight is None else d_weight.add_(d_head)
    if not gradients:
        return nats, None, None
    return nats, torch.cat(d_rows), d_weight[:n_vocab]


def uses_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and HAS_TRITON


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def with_zero_rows(weight: Tensor, n_row: int) -> Tensor:
    """weight (V, d) with zeros up to n_row rows. Their logits are 0, and so are the gradients that the kernel writes."""
    return weight if n_row == len(weight) else functional.pad(weight, (0, 0, 0, n_row - len(weight)))


def rows_in_chunk(n_row: int, n_vocab: int, n_logit: int, multiple: int = 1) -> int:
    """Rows in a chunk of at most about n_logit logits, a multiple of `multiple` if there are several chunks.

    Chunks have equal sizes, because a small last chunk would take as long as a full one.
    """
    n_chunk = -(-n_row * n_vocab // n_logit)
    return min(n_row, rounded_up(-(-n_row // max(1, min(n_chunk, n_row))), multiple))


def torch_loss_of_chunk(
    logits: Tensor, targets: Tensor, n_vocab: int, cap: float | None, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """logits (n, V) -> the chunk's sum of nats, and its gradient (n, V) in the logits' precision, in plain torch."""
    assert logits.shape[1] == n_vocab, "only the kernel takes columns that are no tokens"
    z = logits.float() if cap is None else softcap_by_sigmoid(logits, cap)
    has_target = targets != IGNORED_TARGET
    log_sum_exp = z.logsumexp(1)
    target_logit = z.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    nats = torch.where(has_target, log_sum_exp - target_logit, 0.0).sum()
    if not gradients:
        return nats, None
    is_target = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    d_z = (z - log_sum_exp[:, None]).exp() - is_target.float()
    if cap is not None:
        d_z = d_z * (1 - (z / cap).square())  # the derivative of cap · tanh(x / cap)
    return nats, torch.where(has_target[:, None], d_z, 0.0).to(logits.dtype)


def softcap_by_sigmoid(logits: Tensor, cap: float) -> Tensor:
    """`andrea.model.layers.softcap`, by tanh(x) = 2 sigmoid(2x) - 1: on a CPU, torch compiles a faster sigmoid than tanh."""
    return cap * (2 * torch.sigmoid(logits.float() * (2 / cap)) - 1)


def triton_loss_of_chunk(
    logits: Tensor, targets: Tensor, n_vocab: int, cap: float | None, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Like `torch_loss_of_chunk`, with the Triton kernel, which overwrites the logits with their gradient. logits (n, C):
    the columns beyond n_vocab are no tokens, and their gradient is 0."""
    from andrea.training.loss.kernels.cross_entropy import cross_entropy_of_rows

    return cross_entropy_of_rows(logits, targets, n_vocab, cap or 0.0, gradients).sum(), logits if gradients else None


def native_loss_of_chunk(
    logits: Tensor, targets: Tensor, n_vocab: int, cap: float | None, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Like `torch_loss_of_chunk`, with our kernel for CPUs, which overwrites the bf16 logits with their gradient."""
    assert logits.shape[1] == n_vocab, "only the kernel for GPUs takes columns that are no tokens"
    nats = cross_entropy_cpp.native_cross_entropy(logits, targets, cap or 0.0, gradients)
    return nats.sum(), logits if gradients else None
