"""The Triton kernel of the fused loss: cross-entropy of rows of logits, which it overwrites with their gradient.

n rows, V vocabulary. One program handles one row and reads it twice: first for the log-sum-exp, updated block by block,
then for the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea.text.loader import IGNORED_TARGET

BLOCK, WARPS = 4096, 8  # BLOCK: columns that a program reads at once


@triton.jit
def capped(logit, cap, CAPPED: tl.constexpr):
    """z = cap · tanh(logit / cap), fp32. tanh is computed from exp(-2 |logit| / cap), which cannot overflow."""
    z = logit.to(tl.float32)
    if CAPPED:
        decay = tl.exp(-2 * tl.abs(z) / cap)
        z = tl.where(z < 0, -cap, cap) * (1 - decay) / (1 + decay)
    return z


@triton.jit
def row_kernel(
    logits, targets, nats, stride, n_vocab, cap,
    CAPPED: tl.constexpr, GRADIENTS: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    largest, total, target_logit = -float("inf"), 0.0, 0.0
    for start in range(0, n_vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        in_row = column < n_vocab
        z = tl.where(in_row, capped(tl.load(logits + column, mask=in_row, other=0.0), cap, CAPPED), -float("inf"))
        target_logit += tl.sum(tl.where(column == target, z, 0.0))
        larger = tl.maximum(largest, tl.max(z))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger))
        largest = larger
    log_sum_exp = largest + tl.log(total)
    has_target = target != IGNORED
    tl.store(nats + row, tl.where(has_target, log_sum_exp - target_logit, 0.0))
    if GRADIENTS:
        for start in range(0, n_vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            in_row = column < n_vocab
            logit = tl.load(logits + column, mask=in_row, other=0.0)
            z = capped(logit, cap, CAPPED)
            d_z = tl.exp(z - log_sum_exp) - tl.where(column == target, 1.0, 0.0)
            if CAPPED:
                d_z *= 1 - (z / cap) * (z / cap)
            tl.store(logits + column, tl.where(has_target, d_z, 0.0).to(logit.dtype), mask=in_row)


@torch.library.custom_op("andrea::cross_entropy_of_rows", mutates_args={"logits"})
def cross_entropy_of_rows(logits: Tensor, targets: Tensor, cap: float, gradients: bool) -> Tensor:
    """The loss -ln p(target) of each row, (n,) fp32, from logits (n, V) and targets (n,) int64; 0 for IGNORED_TARGET.

    cap: the soft cap, 0 for none. gradients: overwrite `logits` with the gradient of the sum.
    """
    n_row, n_vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    nats = torch.empty(n_row, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(n_vocab))
    with torch.cuda.device_of(logits):  # Triton alone would launch on the current GPU
        row_kernel[(n_row,)](
            logits, targets, nats, logits.stride(0), n_vocab, cap,
            CAPPED=cap > 0, GRADIENTS=gradients, IGNORED=IGNORED_TARGET, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
    return nats


@cross_entropy_of_rows.register_fake
def _(logits: Tensor, targets: Tensor, cap: float, gradients: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
