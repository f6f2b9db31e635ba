"""The Triton kernel of the fused loss: cross-entropy of rows of logits, which it overwrites with their gradient.

n rows, V vocabulary, C columns in memory: C >= V, and the columns beyond V are no tokens. One program handles one row and
reads it twice: first for the log-sum-exp, then for the gradient.

A soft cap bounds the logits, z = cap · tanh(x / cap) <= cap. Then the log-sum-exp needs no running maximum: the cap itself
takes its place, each lane keeps its own sum, and the lanes are added once after the last column. This holds for caps up to
LARGEST_FIXED, where e^(-2 cap) is still far above the smallest fp32 number; the kernel falls back to the running maximum
for larger caps, and without a cap.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea.text.shards import IGNORED_TARGET

BLOCK, WARPS = 4096, 8  # BLOCK: columns that a program reads at once
LARGEST_FIXED = 40.0
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def hardware_tanh(u):
    """tanh(u) by the one instruction of NVIDIA's GPUs since sm_75, with a relative error of at most 2^-11 (PTX ISA, tanh)."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def capped(logit, cap, to_u, CAPPED: tl.constexpr, HARDWARE: tl.constexpr):
    """(z, t): z = cap · t with t = tanh(u), u = logit / cap, fp32; without CAPPED z = logit.

    to_u: 1 / cap with HARDWARE. Without it 2 log2(e) / cap: tanh(u) = 1 - 2 / (1 + e^(2u)) takes two special functions.
    e^(2u) may overflow to infinity, where the result is 1.
    """
    z, t = logit.to(tl.float32), 0.0
    if CAPPED:
        if HARDWARE:
            t = hardware_tanh(z * to_u)
        else:
            t = 1 - 2 / (1 + tl.exp2(z * to_u))
        z = cap * t
    return z, t


@triton.jit
def row_kernel(
    logits, targets, nats, stride, n_vocab, n_column, cap, to_u,
    CAPPED: tl.constexpr, HARDWARE: tl.constexpr, FIXED: tl.constexpr, GRADIENTS: tl.constexpr, IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """FIXED: the cap takes the place of the running maximum. n_column is a multiple of 16 where memory allows it: a mask
    whose end is aligned lets a thread read 16 bytes at once."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    has_target = target != IGNORED
    logits += row * stride
    target_logit, target_tanh = capped(tl.load(logits + tl.where(has_target, target, 0)), cap, to_u, CAPPED, HARDWARE)
    lanes = tl.zeros([BLOCK], tl.float32)
    largest, total = cap, 0.0
    if not FIXED:
        largest = -float("inf")
    for start in range(0, n_column, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < n_column, other=0.0)
        z, t = capped(logit, cap, to_u, CAPPED, HARDWARE)
        z = tl.where(column < n_vocab, z, -float("inf"))
        if FIXED:
            lanes += tl.exp2((z - largest) * LOG2_E)
        else:
            larger = tl.maximum(largest, tl.max(z))
            total = total * tl.exp2((largest - larger) * LOG2_E) + tl.sum(tl.exp2((z - larger) * LOG2_E))
            largest = larger
    if FIXED:
        total = tl.sum(lanes)
    log_sum_exp = largest + tl.log2(total) * LN_2
    tl.store(nats + row, tl.where(has_target, log_sum_exp - target_logit, 0.0))
    if GRADIENTS:
        for start in range(0, n_column, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = tl.load(logits + column, mask=column < n_column, other=0.0)
            z, t = capped(logit, cap, to_u, CAPPED, HARDWARE)
            d_z = tl.exp2((z - log_sum_exp) * LOG2_E) - tl.where(column == target, 1.0, 0.0)
            if CAPPED:
                d_z *= 1 - t * t
            d_z = tl.where(has_target & (column < n_vocab), d_z, 0.0)
            tl.store(logits + column, d_z.to(logit.dtype), mask=column < n_column)


def has_hardware_tanh(logits: Tensor) -> bool:
    """Whether the GPU's own tanh is used: in training, for logits in bf16, which are rounded four times as coarsely."""
    return logits.dtype == torch.bfloat16 and logits.is_cuda and torch.version.hip is None


@torch.library.custom_op("andrea::cross_entropy_of_rows", mutates_args={"logits"})
def cross_entropy_of_rows(logits: Tensor, targets: Tensor, n_vocab: int, cap: float, gradients: bool) -> Tensor:
    """The loss -ln p(target) of each row, (n,) fp32, from logits (n, C) and targets (n,) int64; 0 for IGNORED_TARGET.

    n_vocab: V <= C, the columns that are tokens. cap: the soft cap, 0 for none. gradients: overwrite `logits` with the
    gradient of the sum, which is 0 beyond V.
    """
    n_row, n_column = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    nats = torch.empty(n_row, dtype=torch.float32, device=logits.device)
    hardware = gradients and has_hardware_tanh(logits)  # an evaluation's loss is exact
    to_u = 0.0 if cap == 0 else (1 if hardware else 2 * LOG2_E.value) / cap
    with torch.cuda.device_of(logits):  # Triton alone would launch on the current GPU
        row_kernel[(n_row,)](
            logits, targets, nats, logits.stride(0), n_vocab, n_column, cap, to_u,
            CAPPED=cap > 0, HARDWARE=hardware, FIXED=0 < cap <= LARGEST_FIXED, GRADIENTS=gradients,
            IGNORED=IGNORED_TARGET, BLOCK=min(BLOCK, triton.next_power_of_2(n_column)), num_warps=WARPS,
        )  # fmt: skip
    return nats


@cross_entropy_of_rows.register_fake
def _(logits: Tensor, targets: Tensor, n_vocab: int, cap: float, gradients: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
