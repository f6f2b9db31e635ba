"""Fused attention in Triton: forward and backward, with each head's statistics from the forward pass.

B batch, H query heads, G key/value heads (G divides H), T queries, S keys, D head width. Query and key are lowered:
their plain dot product is the score. Nothing of size T × S is ever stored.

Forward (Dao 2023, arXiv 2307.08691, algorithm 1). One program computes BLOCK_M queries of one head and loops over
blocks of keys. For each query it carries the running maximum m, the denominator l = Σ e^(s-m) and the weighted sum of
values z. With statistics it carries one more sum, c = Σ e^(s-m) (s-m). The entropy is ln l - c / l, which does not
subtract large numbers from each other. Exponentials are computed in base 2, as the hardware does: the fused
multiply-add that subtracts m also multiplies s by log2(e). The sum c is kept in base 2 too.

Backward (the same paper, algorithm 2). The weights P are computed again from the log-sum-exp. For dK and dV one program
computes BLOCK_N keys and loops over the queries of every head that shares them. dQ is a second kernel, in which each
program computes BLOCK_M queries and adds in a fixed order. (Atomic additions in the first kernel save two matrix products, but
were slower on an H200 at every length of heads of 64, and their order varies.)

A mask has one of three modes. NONE: every query sees every key. CAUSAL: the kernel computes visibility from positions.
INTERVAL: query i sees the keys first[i] .. stop[i]-1, and neither end decreases in i. In every mode, blocks without a
visible pair are skipped, and blocks in which every pair is visible are computed without a mask.

CAPPED and SLOPED: the modifiers of attention/modifiers.py, a soft cap on scores and ALiBi. The backward pass computes them
again. With SINK, the sink's logit joins the denominator after the last key; the statistics but the log-sum-exp are those
of the keys alone. The sink's gradient is `sink_gradient`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from andrea.attention.compatibility import in_rows, like_heads
from andrea.attention.statistics import sink_gradient
from andrea.runtime.device import capability_of

NONE, CAUSAL, INTERVAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The initial running maximum. It is below every score, but finite, so that 0 · (LOWEST - m) is 0 and not NaN.
LOWEST = tl.constexpr(-1e38)

DESCRIPTORS_FROM = 90  # lowest compute capability with a tensor memory accelerator, which reads by descriptor
KernelError = triton.errors.TritonError  # raised for tiles that do not fit the GPU or do not compile


# ---------------------------------------------------------------------------------------------------------------- tiles
# By head width, input type and kind of GPU. `python bench/attention.py --tune` times others.


@dataclass(frozen=True)
class Blocks:
    """Tile sizes (queries M, keys N), warps and pipeline stages of one kernel."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tuning:
    forward: Blocks
    keys: Blocks  # dK, dV
    queries: Blocks  # dQ


def tuning(query: Tensor, value: Tensor) -> Tuning:
    """The tiles for query (B, H, T, D) and value (B, G, S, Dv)."""
    return tiles_of(padded(max(query.shape[-1], value.shape[-1])), query.dtype, capability_of(query.device))


def tiles_of(width: int, dtype: torch.dtype, capability: int) -> Tuning:
    """Tiles for the padded head width, input type and compute capability (80, 86, 89, 90, 100, 120).

    For Hopper and heads of at most 128 in 16 bits, the tiles were the fastest on an H200 at 1,024 keys. The others are the
    largest that spill no registers, according to bench/kernel_resources.py; in fp32, heads of more than 128 spill with all
    tiles (264 bytes for dK and dV on sm_80). No such GPU has measured them yet.

    bench/README.md has what else was compiled in order to overlap products and softmax, and why it is not used.
    """
    if capability >= 120:  # consumer Blackwell has the matrix instructions of Ampere, and 99 KiB of shared memory
        of_ampere = tiles_of(width, dtype, 80)
        spills = dtype != torch.float32 and width <= 128  # in its kernel for dQ, which reads by descriptor here
        return replace(of_ampere, queries=Blocks(32, 64, 4, 2)) if spills else of_ampere
    if dtype == torch.float32:  # full fp32 products run without tensor cores; larger tiles would spill registers
        if width <= 32:
            return Tuning(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1))
        if width <= 128:
            return Tuning(Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1))
        return Tuning(Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1))
    if width > 128:
        return Tuning(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1))
    if width > 64:
        if capability >= 100:
            return Tuning(Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 2))
        if capability >= 90:
            return Tuning(Blocks(128, 32, 8, 3), Blocks(32, 64, 4, 3), Blocks(128, 64, 8, 3))
        return Tuning(Blocks(128, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(128, 32, 8, 2))
    if capability >= 100:
        return Tuning(Blocks(128, 128, 8, 3), Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 3))
    if capability >= 90:
        return Tuning(Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 2), Blocks(64, 64, 4, 3))
    return Tuning(Blocks(128, 64, 8, 3), Blocks(32, 128, 8, 2), Blocks(128, 64, 8, 2))


def padded(width: int) -> int:
    """Width of a tile: the next power of two, and at least the 16 that a matrix product requires."""
    return max(16, 1 << (width - 1).bit_length())


# ------------------------------------------------------------------------------------------ visibility and loading


@triton.jit
def key_range(interval, b, h, rows, start, T, S, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MODE: tl.constexpr):
    """(low, full_low, full_high, high) for a block of query rows. The program visits the keys low .. high-1. Every row sees
    all keys full_low .. full_high-1. All four numbers but high are multiples of BLOCK_N."""
    if MODE == INTERVAL:
        inside = rows < T
        first, stop = load_interval(interval, b, h, rows, T, MODE)
        low = tl.min(tl.where(inside, first, S)) // BLOCK_N * BLOCK_N
        high = tl.max(tl.where(inside, stop, 0))
        full_low = tl.cdiv(tl.max(tl.where(inside, first, 0)), BLOCK_N) * BLOCK_N
        full_high = tl.min(tl.where(inside, stop, S)) // BLOCK_N * BLOCK_N
        full_high = tl.maximum(full_high, full_low)
        if full_high == full_low:  # if no block is visible to all rows, one masked loop visits all keys
            full_low = low
            full_high = low
    else:
        low = 0
        full_low = 0
        high = S
        full_high = S // BLOCK_N * BLOCK_N
        if MODE == CAUSAL:
            top = tl.min(rows) + start  # position of the first row, which sees the keys 0 .. top
            high = tl.maximum(tl.minimum(S, top + BLOCK_M), 0)
            full_high = tl.maximum(tl.minimum(full_high, (top + 1) // BLOCK_N * BLOCK_N), 0)
    return low, full_low, full_high, high


@triton.jit
def is_visible(rows, keys, first_stop, start, S, MODE: tl.constexpr):
    """Whether each row sees each key. rows, keys, and the rows' first and stop broadcast to one shape."""
    visible = keys < S
    if MODE == CAUSAL:
        visible = visible & (keys <= rows + start)
    if MODE == INTERVAL:
        first, stop = first_stop
        visible = visible & (keys >= first) & (keys < stop)
    return visible


@triton.jit
def load_interval(interval, b, h, rows, T, MODE: tl.constexpr):
    """(first, stop) of the rows. They are loaded again in every iteration, because holding them would cost registers."""
    if MODE == INTERVAL:
        first, stop, stride_b, stride_h, stride_t = interval
        offset = b * stride_b + h * stride_h
        inside = rows < T
        return (
            tl.load(first + offset + rows * stride_t, mask=inside, other=0),
            tl.load(stop + offset + rows * stride_t, mask=inside, other=0),
        )
    else:
        return rows, rows


@triton.jit
def load_tile(base, rows, n_rows, stride, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr, BOUNDED: tl.constexpr):
    """A tile (rows, PADDED) of a matrix (n_rows, WIDTH), zero outside the matrix."""
    pointers = base + rows[:, None] * stride + columns[None, :]
    if BOUNDED:
        return tl.load(pointers, mask=(rows[:, None] < n_rows) & (columns[None, :] < WIDTH), other=0.0)
    elif WIDTH == PADDED:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def load_block(
    source, b, h, row, n_rows, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK, PADDED) with the rows row .. row+BLOCK-1 of one head, zero outside the head. source: a descriptor of
    the whole tensor (B, H, rows, WIDTH), or a pointer to the head."""
    if DESCRIPTORS:
        return source.load([b.to(tl.int32), h.to(tl.int32), row, 0]).reshape([BLOCK, PADDED])
    else:
        rows, columns = row + tl.arange(0, BLOCK), tl.arange(0, PADDED)
        return load_tile(source, rows, n_rows, stride, columns, WIDTH, PADDED, BOUNDED)


@triton.jit
def head_of(source, b, h, stride_b, stride_h, DESCRIPTORS: tl.constexpr):
    """The argument `source` of `load_block` for one head."""
    return source if DESCRIPTORS else source + b * stride_b + h * stride_h


@triton.jit
def tanh(x):
    """From e^(-2|x|), and from the series near 0, where 1 - e^(-2|x|) would cancel."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2 * LOG2_E))
    square = x * x
    near = 1 + square * (
        -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835 - square * (1382 / 155925))))
    )
    far = (1 - e) / (1 + e)
    return tl.where(size < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def modified(s, rows, keys, start, cap, slope, CAPPED: tl.constexpr, SLOPED: tl.constexpr):
    """The modified scores, and the derivative of the cap at each score (of no use without CAPPED). rows and keys broadcast
    to the shape of s."""
    derivative = 1.0
    if CAPPED:
        capped = tanh(s / cap)
        s = cap * capped
        derivative = 1 - capped * capped
    if SLOPED:
        s = s - slope * tl.abs(rows + start - keys).to(tl.float32)
    return s, derivative


@triton.jit
def log2_weight(s, base, PRECISION: tl.constexpr):
    """(s - base) log2(e). For 16-bit inputs this is one fused multiply-add. In full fp32 the difference is computed first,
    because the difference is exact where the weight is large."""
    return (s - base) * LOG2_E if PRECISION == "ieee" else s * LOG2_E - base * LOG2_E


# -------------------------------------------------------------------------------------------------------- forward


@triton.jit
def forward_stretch(
    carried, q, k_head, v_head, k_stride, v_stride, rows, interval, b, h, g, start, T, S, low, high, cap, slope,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MODE: tl.constexpr, MASKED: tl.constexpr, STATISTICS: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Update the running values (z, m, total, c) of a block of queries with the keys low .. high-1. `total` is l in the
    module's docstring, which also defines z, m and c.
    """
    z, m, total, c = carried
    for n0 in tl.range(low, high, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        k = load_block(k_head, b, g, n0, S, k_stride, D_QK, PADDED_QK, BLOCK_N, MASKED, DESCRIPTORS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (M, N), not yet in base 2
        s, _ = modified(s, rows[:, None], keys[None, :], start, cap, slope, CAPPED, SLOPED)
        if MASKED:
            first, stop = load_interval(interval, b, h, rows, T, MODE)
            visible = is_visible(rows[:, None], keys[None, :], (first[:, None], stop[:, None]), start, S, MODE)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shifted = log2_weight(s, m_new[:, None], PRECISION)
        p = tl.exp2(shifted)
        log2_shrink = (m - m_new) * LOG2_E
        shrink = tl.exp2(log2_shrink)
        if STATISTICS:
            if MASKED:
                shifted = tl.where(visible, shifted, 0.0)  # 0 · (-inf) would be NaN
            c = shrink * (c + log2_shrink * total) + tl.sum(p * shifted, 1)
        total = total * shrink + tl.sum(p, 1)
        v = load_block(v_head, b, g, n0, S, v_stride, D_V, PADDED_V, BLOCK_N, MASKED, DESCRIPTORS)
        z = tl.dot(p.to(v.dtype), v, z * shrink[:, None], input_precision=PRECISION)
        m = m_new
    return z, m, total, c


@triton.jit
def forward_kernel(
    q, k, v, z, lse, largest, entropy, first, stop, slopes, sink,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, z_b, z_h, z_t, i_b, i_h, i_t,
    H, T, S, start, GROUP, cap,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MODE: tl.constexpr, STATISTICS: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Output and statistics of BLOCK_M queries of one head."""
    n_block = tl.cdiv(T, BLOCK_M)
    # Under a causal mask the last rows take longest. They start first, so that no long program is left at the end.
    block, bh = n_block - 1 - tl.program_id(0) % n_block, tl.program_id(0) // n_block
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    interval = (first, stop, i_b, i_h, i_t)
    low, full_low, full_high, high = key_range(interval, b, h, rows, start, T, S, BLOCK_M, BLOCK_N, MODE)

    q_tile = load_tile(q + b * q_b + h * q_h, rows, T, q_t, tl.arange(0, PADDED_QK), D_QK, PADDED_QK, True)
    g = h // GROUP
    slope = tl.load(slopes + h) if SLOPED else 0.0
    k_head, v_head = head_of(k, b, g, k_b, k_h, DESCRIPTORS), head_of(v, b, g, v_b, v_h, DESCRIPTORS)
    carried = (
        tl.zeros([BLOCK_M, PADDED_V], tl.float32),
        tl.full([BLOCK_M], LOWEST, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    bounds = (low, full_low, full_high, high)  # only the keys between the middle two are computed without a mask
    for part in tl.static_range(0 if MODE == INTERVAL else 1, 3):
        carried = forward_stretch(
            carried, q_tile, k_head, v_head, k_t, v_t, rows, interval, b, h, g, start, T, S, bounds[part], bounds[part + 1],
            cap, slope, D_QK, D_V, PADDED_QK, PADDED_V, BLOCK_N, MODE, part != 1, STATISTICS, PRECISION, DESCRIPTORS,
            CAPPED, SLOPED,
        )  # fmt: skip

    z_tile, m, total, c = carried
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    top, whole = m, total  # of keys and sink: the largest logit, and the denominator in units of e^top
    if SINK:
        sink_logit = tl.load(sink + h)
        top = tl.maximum(m, sink_logit)
        shrink = tl.exp2((m - top) * LOG2_E)
        whole = total * shrink + tl.exp2((sink_logit - top) * LOG2_E)
        z_tile = z_tile * shrink[:, None]
    inside = rows < T
    columns = tl.arange(0, PADDED_V)
    z_pointers = z + b * z_b + h * z_h + rows[:, None] * z_t + columns[None, :]
    tl.store(
        z_pointers, (z_tile / whole[:, None]).to(z.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < D_V)
    )
    row = bh.to(tl.int64) * T + rows
    tl.store(lse + row, tl.where(blind, float("-inf"), top + tl.log2(whole) * LN_2), mask=inside)
    if STATISTICS:
        tl.store(largest + row, tl.where(blind, float("-inf"), m), mask=inside)
        tl.store(entropy + row, tl.where(blind, 0.0, (tl.log2(total) - c / total) * LN_2), mask=inside)


# ------------------------------------------------------------------------------------------------------- backward


@triton.jit
def delta_kernel(
    z, dz, delta, z_b, z_h, z_t, dz_b, dz_h, dz_t, H, T,
    D_V: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta_i = z_i · dz_i = Σ_j p_ij dp_ij, the term that the gradient of a softmax subtracts from dp_ij."""
    n_block = tl.cdiv(T, BLOCK_M)
    block, bh = tl.program_id(0) % n_block, tl.program_id(0) // n_block
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows, columns = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, PADDED_V)
    z_tile = load_tile(z + b * z_b + h * z_h, rows, T, z_t, columns, D_V, PADDED_V, True).to(tl.float32)
    dz_tile = load_tile(dz + b * dz_b + h * dz_h, rows, T, dz_t, columns, D_V, PADDED_V, True).to(tl.float32)
    tl.store(delta + bh.to(tl.int64) * T + rows, tl.sum(z_tile * dz_tile, 1), mask=rows < T)


@triton.jit
def load_row_sums(lse, delta, rows, T):
    """Log-sum-exp and delta of the rows. Rows that see no key, and rows beyond T, get a log-sum-exp of +inf, which makes
    their weights zero."""
    log_sum = tl.load(lse + rows, mask=rows < T, other=float("-inf"))
    return tl.where(log_sum == float("-inf"), float("inf"), log_sum), tl.load(delta + rows, mask=rows < T, other=0.0)


@triton.jit
def keys_stretch(
    carried, k, v, q_head, dz_head, lse, delta, interval, b, h, keys, q_t, dz_t, start, T, S, low, high, cap, slope,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr,
    MODE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries low .. high-1 to the gradients (dk, dv) of a block of keys. Scores and
    weights are (N, M)."""
    dk, dv = carried
    for m0 in tl.range(low, high, BLOCK_M):
        rows = m0 + tl.arange(0, BLOCK_M)
        q = load_block(q_head, b, h, m0, T, q_t, D_QK, PADDED_QK, BLOCK_M, True, DESCRIPTORS)
        log_sum, row_delta = load_row_sums(lse, delta, rows, T)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dz = load_block(dz_head, b, h, m0, T, dz_t, D_V, PADDED_V, BLOCK_M, True, DESCRIPTORS)
        dp = tl.dot(v, tl.trans(dz), input_precision=PRECISION)  # before the softmax, which runs beside this product
        s, derivative = modified(s, rows[None, :], keys[:, None], start, cap, slope, CAPPED, SLOPED)
        p = tl.exp2(log2_weight(s, log_sum[None, :], PRECISION))
        if MASKED:
            first, stop = load_interval(interval, b, h, rows, T, MODE)
            visible = is_visible(rows[None, :], keys[:, None], (first[None, :], stop[None, :]), start, S, MODE)
            p = tl.where(visible, p, 0.0)
        dv = tl.dot(p.to(dz.dtype), dz, dv, input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        if CAPPED:
            ds = ds * derivative
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(
    q, k, v, dz, lse, delta, dk, dv, first, stop, ranges, slopes,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dz_b, dz_h, dz_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    i_b, i_h, i_t, r_b, r_h, r_n,
    H, T, S, start, GROUP, cap,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MODE: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one key/value head."""
    groups, n_block = H // GROUP, tl.cdiv(S, BLOCK_N)
    block, bg = tl.program_id(0) % n_block, tl.program_id(0) // n_block
    b, g = (bg // groups).to(tl.int64), (bg % groups).to(tl.int64)
    n0 = block * BLOCK_N
    keys = n0 + tl.arange(0, BLOCK_N)
    columns_qk, columns_v = tl.arange(0, PADDED_QK), tl.arange(0, PADDED_V)
    k_tile = load_tile(k + b * k_b + g * k_h, keys, S, k_t, columns_qk, D_QK, PADDED_QK, True)
    v_tile = load_tile(v + b * v_b + g * v_h, keys, S, v_t, columns_v, D_V, PADDED_V, True)
    carried = tl.zeros([BLOCK_N, PADDED_QK], tl.float32), tl.zeros([BLOCK_N, PADDED_V], tl.float32)
    for member in tl.range(0, GROUP):
        h = g * GROUP + member
        slope = tl.load(slopes + h) if SLOPED else 0.0
        low, full_low, high = 0, 0, T
        if MODE == CAUSAL:  # key n is visible from row n - start on
            low = tl.maximum(n0 - start, 0) // BLOCK_M * BLOCK_M
            full_low = tl.maximum(tl.cdiv(tl.maximum(n0 + BLOCK_N - 1 - start, 0), BLOCK_M) * BLOCK_M, low)
            full_low = tl.minimum(full_low, tl.cdiv(T, BLOCK_M) * BLOCK_M)
        # Keys beyond the last one are zeros. Without a mask their weights are e^-lse, in rows that are not stored.
        full_high = high
        if MODE == INTERVAL:
            where = ranges + b * r_b + h * r_h + block * r_n
            low = tl.load(where) // BLOCK_M * BLOCK_M
            full_low = tl.cdiv(tl.load(where + 1), BLOCK_M) * BLOCK_M
            full_high = tl.load(where + 2) // BLOCK_M * BLOCK_M
            high = tl.load(where + 3)
            if full_high <= full_low:  # no block of queries sees all keys: one masked loop visits all queries
                full_low = low
                full_high = low
        q_head, dz_head = head_of(q, b, h, q_b, q_h, DESCRIPTORS), head_of(dz, b, h, dz_b, dz_h, DESCRIPTORS)
        row = (b * H + h) * T
        interval = (first, stop, i_b, i_h, i_t)
        bounds = (low, full_low, full_high, high)  # the queries between the middle two see every key of the block
        for part in tl.static_range(1 if MODE == NONE else 0, 3 if MODE == INTERVAL else 2):
            carried = keys_stretch(
                carried, k_tile, v_tile, q_head, dz_head, lse + row, delta + row, interval, b, h, keys,
                q_t, dz_t, start, T, S, bounds[part], bounds[part + 1], cap, slope,
                D_QK, D_V, PADDED_QK, PADDED_V, BLOCK_M, MODE, part != 1, PRECISION, DESCRIPTORS,
                CAPPED, SLOPED,
            )  # fmt: skip
    dk_tile, dv_tile = carried
    inside = keys[:, None] < S
    dk_pointers = dk + b * dk_b + g * dk_h + keys[:, None] * dk_t + columns_qk[None, :]
    tl.store(dk_pointers, dk_tile.to(dk.dtype.element_ty), mask=inside & (columns_qk[None, :] < D_QK))
    dv_pointers = dv + b * dv_b + g * dv_h + keys[:, None] * dv_t + columns_v[None, :]
    tl.store(dv_pointers, dv_tile.to(dv.dtype.element_ty), mask=inside & (columns_v[None, :] < D_V))


@triton.jit
def queries_stretch(
    dq, q, dz, k_head, v_head, k_t, v_t, log_sum, delta, rows, interval, b, h, g, start, T, S, low, high, cap, slope,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MODE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the keys low .. high-1 to the gradient dq of a block of queries."""
    for n0 in tl.range(low, high, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        k = load_block(k_head, b, g, n0, S, k_t, D_QK, PADDED_QK, BLOCK_N, MASKED, DESCRIPTORS)
        v = load_block(v_head, b, g, n0, S, v_t, D_V, PADDED_V, BLOCK_N, MASKED, DESCRIPTORS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(dz, tl.trans(v), input_precision=PRECISION)  # before the softmax, which runs beside this product
        s, derivative = modified(s, rows[:, None], keys[None, :], start, cap, slope, CAPPED, SLOPED)
        p = tl.exp2(log2_weight(s, log_sum[:, None], PRECISION))
        if MASKED:
            first, stop = load_interval(interval, b, h, rows, T, MODE)
            visible = is_visible(rows[:, None], keys[None, :], (first[:, None], stop[:, None]), start, S, MODE)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - delta[:, None])
        if CAPPED:
            ds = ds * derivative
        ds = ds.to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def queries_kernel(
    q, k, v, dz, lse, delta, dq, first, stop, slopes,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dz_b, dz_h, dz_t, dq_b, dq_h, dq_t, i_b, i_h, i_t,
    H, T, S, start, GROUP, cap,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries of one head."""
    n_block = tl.cdiv(T, BLOCK_M)
    block, bh = n_block - 1 - tl.program_id(0) % n_block, tl.program_id(0) // n_block
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_qk, columns_v = tl.arange(0, PADDED_QK), tl.arange(0, PADDED_V)
    interval = (first, stop, i_b, i_h, i_t)
    low, full_low, full_high, high = key_range(interval, b, h, rows, start, T, S, BLOCK_M, BLOCK_N, MODE)
    q_tile = load_tile(q + b * q_b + h * q_h, rows, T, q_t, columns_qk, D_QK, PADDED_QK, True)
    dz_tile = load_tile(dz + b * dz_b + h * dz_h, rows, T, dz_t, columns_v, D_V, PADDED_V, True)
    row = bh.to(tl.int64) * T
    log_sum, row_delta = load_row_sums(lse + row, delta + row, rows, T)
    g = h // GROUP
    slope = tl.load(slopes + h) if SLOPED else 0.0
    k_head, v_head = head_of(k, b, g, k_b, k_h, DESCRIPTORS), head_of(v, b, g, v_b, v_h, DESCRIPTORS)
    dq_tile = tl.zeros([BLOCK_M, PADDED_QK], tl.float32)
    bounds = (low, full_low, full_high, high)
    for part in tl.static_range(0 if MODE == INTERVAL else 1, 3):
        dq_tile = queries_stretch(
            dq_tile, q_tile, dz_tile, k_head, v_head, k_t, v_t, log_sum, row_delta, rows, interval, b, h, g, start, T, S,
            bounds[part], bounds[part + 1], cap, slope, D_QK, D_V, PADDED_QK, PADDED_V, BLOCK_N, MODE, part != 1,
            PRECISION, DESCRIPTORS, CAPPED, SLOPED,
        )  # fmt: skip
    pointers = dq + b * dq_b + h * dq_h + rows[:, None] * dq_t + columns_qk[None, :]
    tl.store(pointers, dq_tile.to(dq.dtype.element_ty), mask=(rows[:, None] < T) & (columns_qk[None, :] < D_QK))


# ---------------------------------------------------------------------------------------------------- the operators


def described(
    one: Tensor, other: Tensor, block: int
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, bool]:
    """Return both tensors as descriptors of tiles of `block` rows, and True.

    If descriptors are impossible, return both tensors unchanged, and False. Descriptors need a tensor memory
    accelerator (Hopper and later), 16-bit numbers, and addresses and strides that are multiples of 16 bytes. They save
    up to a third of the registers, because threads compute no addresses.
    """
    tensors = (one, other)
    aligned = all(
        tensor.numel()
        and tensor.data_ptr() % 16 == 0
        and all(stride > 0 and stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )
    if capability_of(one.device) < DESCRIPTORS_FROM or one.dtype == torch.float32 or not aligned:
        return one, other, False
    tiles = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, block, padded(tensor.shape[-1])])
        for tensor in tensors
    )
    return *tiles, True


def constants_of(query: Tensor, value: Tensor, softcap: float, slopes: Tensor | None) -> dict:
    d_qk, d_v = query.shape[-1], value.shape[-1]
    precision = "ieee" if query.dtype == torch.float32 else "tf32"  # tf32 has no effect on 16-bit inputs
    widths = {"D_QK": d_qk, "D_V": d_v, "PADDED_QK": padded(d_qk), "PADDED_V": padded(d_v)}
    return widths | {"PRECISION": precision, "CAPPED": softcap > 0, "SLOPED": slopes is not None}


def interval_of(first: Tensor | None, stop: Tensor | None, query: Tensor, causal: bool) -> tuple:
    """Return (mode, first, stop, strides): the mask's mode; for each query the index of the first key that it sees and
    the index after the last, as (B, H, T) views; and the strides of these views."""
    if first is None or stop is None:
        return (CAUSAL if causal else NONE), query, query, (0, 0, 0)  # any pointer, because the kernel does not read it
    first, stop = first.expand(query.shape[:3]), stop.expand(query.shape[:3])
    assert first.stride() == stop.stride()
    return INTERVAL, first, stop, first.stride()


def launch(kernel, n_program: int, like: Tensor, *arguments, **options) -> None:
    """Launch n_program programs on the GPU that holds `like`. Triton alone would launch on the current GPU."""
    with torch.cuda.device_of(like):
        kernel[(n_program,)](*arguments, **options, enable_fp_fusion=True)


@torch.library.custom_op("andrea::fused_attention", mutates_args=())
def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    stop: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    start: int,
    softcap: float,
    slopes: Tensor | None,
    sink: Tensor | None,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (B, H, T, Dv), and log-sum-exp, largest logit and entropy in nats, (B, H, T) each in fp32.

    query (B, H, T, D), key (B, G, S, D) and value (B, G, S, Dv) have the same type. Without `statistics` the largest
    logit and the entropy are empty. If first and stop are given, query i sees the keys first[i] .. stop[i]-1; both are
    int32, broadcastable to (B, H, T), have equal strides and do not decrease in i; a backward pass then needs `ranges`, from
    `query_ranges`. With `causal` query i sees the keys
    0 .. start + i, otherwise all keys.
    start: position of the first query. softcap: the cap on scores, or 0. slopes: ALiBi's slopes (H,). sink: the sinks'
    logits (H,). Both are fp32.
    """
    query, key, value = in_rows(query), in_rows(key), in_rows(value)
    n_batch, n_head, n_query = query.shape[:3]
    n_group, n_key = key.shape[1:3]
    output, lse, largest, entropy = empty_outputs(query, value, statistics)
    if 0 in (n_batch, n_head, n_query):
        return output, lse, largest, entropy
    mode, first, stop, strides = interval_of(first, stop, query, causal)
    tuned = tuning(query, value)
    blocks = tuned.forward
    k_source, v_source, descriptors = described(key, value, blocks.n)
    launch(
        forward_kernel, triton.cdiv(n_query, blocks.m) * n_batch * n_head, query,
        query, k_source, v_source, output, lse, largest, entropy, first, stop, slopes, sink,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3], *strides,
        n_head, n_query, n_key, start, n_head // n_group, softcap,
        **constants_of(query, value, softcap, slopes), BLOCK_M=blocks.m, BLOCK_N=blocks.n, MODE=mode, STATISTICS=statistics,
        DESCRIPTORS=descriptors, SINK=sink is not None, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return output, lse, largest, entropy


def empty_outputs(query: Tensor, value: Tensor, statistics: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    of_rows = [query.new_empty(rows if wanted else (0,), dtype=torch.float32) for wanted in (True, *2 * (statistics,))]
    return like_heads(query, value.shape[-1]), *of_rows


@fused_attention.register_fake
def _(query, key, value, first, stop, ranges, causal, start, softcap, slopes, sink, statistics):
    return empty_outputs(query, value, statistics)


@torch.library.custom_op("andrea::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    first: Tensor | None,
    stop: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    start: int,
    softcap: float,
    slopes: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sink, in their shapes and types; the last is empty without a sink."""
    d_output, query, key, value = map(in_rows, (d_output, query, key, value))
    n_batch, n_head, n_query = query.shape[:3]
    n_group, n_key, d_v = value.shape[1:]
    d_query, d_key, d_value, d_sink = empty_gradients(query, key, value, sink)
    if 0 in (n_batch, n_head, n_query):
        return d_query.zero_(), d_key.zero_(), d_value.zero_(), d_sink.zero_()
    mode, first, stop, strides = interval_of(first, stop, query, causal)
    constants, blocks = constants_of(query, value, softcap, slopes), tuning(query, value)

    delta = torch.empty_like(lse)
    launch(
        delta_kernel, triton.cdiv(n_query, 64) * n_batch * n_head, query,
        output, d_output, delta, *output.stride()[:3], *d_output.stride()[:3], n_head, n_query,
        D_V=d_v, PADDED_V=constants["PADDED_V"], BLOCK_M=64,
    )  # fmt: skip

    if sink is not None:
        d_sink = sink_gradient(sink, lse, delta)
    range_strides = 3 * (0,) if ranges is None else ranges.expand(*query.shape[:2], *ranges.shape[2:]).stride()[:3]
    q_source, dz_source, descriptors = described(query, d_output, blocks.keys.m)
    launch(
        keys_kernel, triton.cdiv(n_key, blocks.keys.n) * n_batch * n_group, query,
        q_source, key, value, dz_source, lse, delta, d_key, d_value, first, stop, lse if ranges is None else ranges, slopes,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *d_output.stride()[:3],
        *d_key.stride()[:3], *d_value.stride()[:3], *strides, *range_strides,
        n_head, n_query, n_key, start, n_head // n_group, softcap,
        **constants, BLOCK_M=blocks.keys.m, BLOCK_N=blocks.keys.n, MODE=mode,
        DESCRIPTORS=descriptors, num_warps=blocks.keys.warps, num_stages=blocks.keys.stages,
    )  # fmt: skip
    k_source, v_source, descriptors = described(key, value, blocks.queries.n)
    launch(
        queries_kernel, triton.cdiv(n_query, blocks.queries.m) * n_batch * n_head, query,
        query, k_source, v_source, d_output, lse, delta, d_query, first, stop, slopes,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *d_output.stride()[:3], *d_query.stride()[:3], *strides,
        n_head, n_query, n_key, start, n_head // n_group, softcap,
        **constants, BLOCK_M=blocks.queries.m, BLOCK_N=blocks.queries.n, MODE=mode, DESCRIPTORS=descriptors,
        num_warps=blocks.queries.warps, num_stages=blocks.queries.stages,
    )  # fmt: skip
    return d_query, d_key, d_value, d_sink


def empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *map(like_heads, (query, key, value)), query.new_empty(0 if sink is None else len(sink), dtype=torch.float32)


def query_ranges(query: Tensor, value: Tensor, first: Tensor, stop: Tensor) -> Tensor:
    """For each block of keys, of the tiles for these tensors, low, full_low, full_high and high, (B or 1, H or 1, blocks, 4) int32:
    the queries low .. high-1 may see a key of the block, and full_low .. full_high-1 see all of them."""
    n_key, block = value.shape[-2], tuning(query, value).keys.n
    first, stop = (unexpanded(tensor).contiguous() for tensor in (first, stop))
    begin = torch.arange(0, n_key, block, dtype=torch.int32, device=first.device)
    end = (begin + block).clamp(max=n_key)
    keys = torch.cat([begin + 1, end]).expand(*first.shape[:2], -1).contiguous()
    low, full_low = torch.searchsorted(stop, keys, out_int32=True).chunk(2, -1)  # rows with stop <= begin; stop < end
    full_high, high = torch.searchsorted(first, keys, out_int32=True).chunk(2, -1)  # first <= begin; first < end
    return torch.stack([low, full_low, full_high, high], dim=-1)


def unexpanded(tensor: Tensor) -> Tensor:
    """Undo `expand` in the dimensions B and H: all heads of all texts often have one mask, which is searched once."""
    for dim in (0, 1):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@fused_attention_backward.register_fake
def _(d_output, query, key, value, output, lse, first, stop, ranges, causal, start, softcap, slopes, sink):
    return empty_gradients(query, key, value, sink)


def keep_for_backward(ctx, inputs, output) -> None:
    query, key, value, first, stop, ranges, causal, start, softcap, slopes, sink, _ = inputs
    ctx.save_for_backward(query, key, value, output[0], output[1], first, stop, ranges, slopes, sink)
    ctx.options = (causal, start, softcap)


def backward(ctx, d_output, *of_statistics):
    """Only the output has a gradient, because the statistics are detached."""
    *saved, slopes, sink = ctx.saved_tensors
    causal, start, softcap = ctx.options
    *gradients, d_sink = fused_attention_backward(d_output, *saved, causal, start, softcap, slopes, sink)
    return *gradients, *7 * (None,), None if sink is None else d_sink, None


fused_attention.register_autograd(backward, setup_context=keep_for_backward)
