"""From the products of W_Q, W_K and W_V to what attention reads, in one pass: value mix, convolution, norm and rotation.

B sequences, T tokens, H query heads, G key/value heads, N = H + 2 G heads of width D, K tokens that the convolution mixes.
The readable twin is `MultiHeadAttention.project` without this operator: `mixed`, `convolved`, `normed`, `lowered` and the
rotation, one after the other. Compiled, these write 3.7 times as many bytes: copies of q, k and v with zeros in front, and
what lies between them in fp32. Here everything between reading and writing is fp32 in registers.

Of one head, with m the mixed value (m = x for queries and keys) and w_0 = 1 + taps_0, w_i = taps_i:

    y_t = Σ_i w_i m_{t-i}        n_t = y_t / rms(y_t)        z_t = rotation_t(scale n_t)

The backward pass is two kernels: the first computes y and n again from x and writes the gradient of y, the second convolves
that with the tokens behind. (One kernel for both computes each gradient K times: 0.90 ms on an H200 where two take less, for
65,536 tokens of 36 heads of width 64.) The gradients of taps and share are sums over all tokens: each program writes its part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of the tokens of one head, which a program computes
WARPS = {"forward": 2, "gradient": 1, "backward": 4}


@triton.jit
def load_mixed(x, x_t, first, first_t, share, rows, T, columns, MIX: tl.constexpr):
    """m of the rows and columns, fp32, zero outside 0 .. T-1; with MIX x + share (first - x)."""
    inside = ((rows >= 0) & (rows < T))[:, None]
    m = tl.load(x + rows[:, None] * x_t + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if MIX:
        other = tl.load(first + rows[:, None] * first_t + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        m += share * (other - m)
    return m


@triton.jit
def load_weight(taps, columns, i: tl.constexpr, K: tl.constexpr):
    """w_i of the columns."""
    return tl.load(taps + columns * K + i).to(tl.float32) + (1.0 if i == 0 else 0.0)


@triton.jit
def convolved(x, x_t, first, first_t, share, taps, rows, T, columns, K: tl.constexpr, MIX: tl.constexpr):
    """y of the rows and columns."""
    y = load_mixed(x, x_t, first, first_t, share, rows, T, columns, MIX) * load_weight(taps, columns, 0, K)[None, :]
    for i in tl.static_range(1, K):
        earlier = load_mixed(x, x_t, first, first_t, share, rows - i, T, columns, MIX)
        y += earlier * load_weight(taps, columns, i, K)[None, :]
    return y


@triton.jit
def load_rotation(cosine, sine, turn_t, rows, T, low, high):
    """Cosine and sine of the angles of the rows' pairs. The table's first half of sines is negative."""
    inside = (rows < T)[:, None]
    c = tl.load(cosine + rows[:, None] * turn_t + low[None, :], mask=inside, other=1.0)
    return c, tl.load(sine + rows[:, None] * turn_t + high[None, :], mask=inside, other=0.0)


@triton.jit
def inverse_rms(low, high, epsilon, D: tl.constexpr):
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + epsilon)[:, None]


@triton.jit
def forward_kernel(
    x, first, share, taps, cosine, sine, z, x_b, x_t, f_b, f_t, f_h, turn_t, T, N_HEAD, epsilon, scale,
    D: tl.constexpr, K: tl.constexpr, MIX: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z of BLOCK tokens of one head. The head's columns are computed as two halves, whose entries are the rotation's pairs."""
    bh = tl.program_id(0)
    b, h = (bh // N_HEAD).to(tl.int64), bh % N_HEAD
    x += b * x_b + h * D
    z += b * T * N_HEAD * D + h * D
    taps += h * D * K
    part = 0.0
    if MIX:
        first += b * f_b + h * f_h
        part = tl.load(share)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low = tl.arange(0, D // 2)
    high = low + D // 2
    y_low = convolved(x, x_t, first, f_t, part, taps, rows, T, low, K, MIX)
    y_high = convolved(x, x_t, first, f_t, part, taps, rows, T, high, K, MIX)
    if NORM:
        factor = inverse_rms(y_low, y_high, epsilon, D) * scale
        y_low *= factor
        y_high *= factor
    if ROTATE:
        c, s = load_rotation(cosine, sine, turn_t, rows, T, low, high)
        y_low, y_high = y_low * c - y_high * s, y_high * c + y_low * s
    pointers = z + rows[:, None] * (N_HEAD * D)
    inside = (rows < T)[:, None]
    tl.store(pointers + low[None, :], y_low.to(z.dtype.element_ty), mask=inside)
    tl.store(pointers + high[None, :], y_high.to(z.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    d_z, x, first, share, taps, cosine, sine, d_y, d_taps,
    d_b, d_t, d_h, x_b, x_t, f_b, f_t, f_h, turn_t, T, N_HEAD, epsilon, scale,
    D: tl.constexpr, K: tl.constexpr, MIX: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of y for BLOCK tokens of one head, and these tokens' part of the taps' gradient. Without norm and rotation
    that of y is d_z itself, and is not written."""
    bh = tl.program_id(0)
    b, h = (bh // N_HEAD).to(tl.int64), bh % N_HEAD
    d_z += b * d_b + h * d_h
    x += b * x_b + h * D
    part = 0.0
    if MIX:
        first += b * f_b + h * f_h
        part = tl.load(share)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low = tl.arange(0, D // 2)
    high = low + D // 2
    inside = (rows < T)[:, None]
    d_low = tl.load(d_z + rows[:, None] * d_t + low[None, :], mask=inside, other=0.0).to(tl.float32)
    d_high = tl.load(d_z + rows[:, None] * d_t + high[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        c, s = load_rotation(cosine, sine, turn_t, rows, T, low, high)
        d_low, d_high = d_low * c + d_high * s, d_high * c - d_low * s
    if NORM:
        y_low = convolved(x, x_t, first, f_t, part, taps + h * D * K, rows, T, low, K, MIX)
        y_high = convolved(x, x_t, first, f_t, part, taps + h * D * K, rows, T, high, K, MIX)
        factor = inverse_rms(y_low, y_high, epsilon, D)
        along = ((tl.sum(d_low * y_low, 1) + tl.sum(d_high * y_high, 1)) / D)[:, None] * factor * factor
        d_low = (d_low - y_low * along) * factor * scale
        d_high = (d_high - y_high * along) * factor * scale
    d_taps += (bh.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * K * D
    for i in tl.static_range(K):
        m_low = load_mixed(x, x_t, first, f_t, part, rows - i, T, low, MIX)
        m_high = load_mixed(x, x_t, first, f_t, part, rows - i, T, high, MIX)
        tl.store(d_taps + i * D + low, tl.sum(d_low * m_low, 0))
        tl.store(d_taps + i * D + high, tl.sum(d_high * m_high, 0))
    if NORM or ROTATE:
        pointers = d_y + b * T * N_HEAD * D + h * D + rows[:, None] * (N_HEAD * D)
        tl.store(pointers + low[None, :], d_low.to(d_y.dtype.element_ty), mask=inside)
        tl.store(pointers + high[None, :], d_high.to(d_y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    d_y, x, first, share, taps, d_x, d_first, d_share, d_b, d_t, d_h, x_b, x_t, f_b, f_t, f_h, T, N_HEAD,
    D: tl.constexpr, K: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of x and first for BLOCK tokens of one head, and these tokens' part of the share's."""
    bh = tl.program_id(0)
    b, h = (bh // N_HEAD).to(tl.int64), bh % N_HEAD
    d_y += b * d_b + h * d_h
    taps += h * D * K
    rows, columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    d_m = load_mixed(d_y, d_t, d_y, d_t, 0.0, rows, T, columns, False) * load_weight(taps, columns, 0, K)[None, :]
    for i in tl.static_range(1, K):
        later = load_mixed(d_y, d_t, d_y, d_t, 0.0, rows + i, T, columns, False)
        d_m += later * load_weight(taps, columns, i, K)[None, :]
    inside = (rows < T)[:, None]
    if MIX:
        part = tl.load(share)
        own = load_mixed(x + b * x_b + h * D, x_t, first, f_t, 0.0, rows, T, columns, False)
        other = load_mixed(first + b * f_b + h * f_h, f_t, first, f_t, 0.0, rows, T, columns, False)
        program = bh.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(d_share + program, tl.sum(tl.sum(d_m * (other - own), 1), 0))
        d_first += b * T * N_HEAD * D + h * D + rows[:, None] * (N_HEAD * D)
        tl.store(d_first + columns[None, :], (part * d_m).to(d_first.dtype.element_ty), mask=inside)
        d_m *= 1 - part
    d_x += b * x_b + h * D + rows[:, None] * x_t
    tl.store(d_x + columns[None, :], d_m.to(d_x.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------- the operator


def heads_of_parts(n_head: int, n_group: int) -> list[tuple[int, int, bool]]:
    """(first head, number of heads, whether they are values) of queries, keys and values."""
    return [(0, n_head, False), (n_head, n_group, False), (n_head + n_group, n_group, True)]


def grid_and_constants(n_batch: int, n_token: int, n_head: int, taps: Tensor, mixes: bool) -> tuple[tuple, dict]:
    """The grid (n_batch * n_head, blocks) of one part, and what all kernels take as constants."""
    width, n_mixed = taps.shape[1:]
    block = max(16, ELEMENTS // width)
    return (n_batch * n_head, triton.cdiv(n_token, block)), {"D": width, "K": n_mixed, "MIX": mixes, "BLOCK": block}


def steps(first: Tensor | None) -> tuple[int, int, int]:
    """Elements from one sequence, token and head of the first values (B, T, G, D) to the next."""
    return (0, 0, 0) if first is None else first.stride()[:3]


@torch.library.custom_op("andrea::prepared_heads", mutates_args=())
def prepared_heads(
    projected: Tensor,
    taps: Tensor,
    first: Tensor | None,
    share: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    n_head: int,
    epsilon: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, T, H, D), key and value (B, T, G, D), of the type of `projected`.

    projected (B, T, N D): the products with W_Q, W_K and W_V, side by side, in fp32, fp16 or bf16. taps (N, D, K) fp32. first
    (B, T, G, D): the first layer's values, of which the values get the share `share` (1,) fp32; None: no mix. cosine, sine
    (T, D) fp32, the sines of the first half negative; None: no rotation. epsilon: of the norm of queries and keys. scale:
    the queries' factor after it. D is a power of two.
    """
    (n_batch, n_token, _), width, results = projected.shape, taps.shape[1], []
    assert projected.is_contiguous() and taps.is_contiguous(), (projected.stride(), taps.stride())
    assert first is None or first.stride(-1) == 1, first.stride()
    if cosine is not None:
        assert cosine.shape == sine.shape == (n_token, width), (cosine.shape, sine.shape)
        assert cosine.stride() == sine.stride() and cosine.stride(1) == 1, (cosine.stride(), sine.stride())
    turn_t = 0 if cosine is None else cosine.stride(0)
    for start, n_part, is_value in heads_of_parts(n_head, (len(taps) - n_head) // 2):
        z = projected.new_empty(n_batch, n_token, n_part, width)
        grid, constants = grid_and_constants(n_batch, n_token, n_part, taps, is_value and first is not None)
        with torch.cuda.device_of(projected):  # Triton alone would launch on the current GPU
            forward_kernel[grid](
                projected[..., start * width :], first, share, taps[start:], cosine, sine, z, *projected.stride()[:2],
                *steps(first), turn_t, n_token, n_part, epsilon, scale if start == 0 else 1.0, NORM=not is_value,
                ROTATE=not is_value and cosine is not None, num_warps=WARPS["forward"], **constants,
            )  # fmt: skip
        results.append(z)
    return tuple(results)


@prepared_heads.register_fake
def _(projected, taps, first, share, cosine, sine, n_head, epsilon, scale):
    n_group, width = (len(taps) - n_head) // 2, taps.shape[1]
    return tuple(projected.new_empty(*projected.shape[:2], n, width) for n in (n_head, n_group, n_group))


@torch.library.custom_op("andrea::prepared_heads_backward", mutates_args=())
def prepared_heads_backward(
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    projected: Tensor,
    taps: Tensor,
    first: Tensor | None,
    share: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    epsilon: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of projected, taps, first and share; those of first and share are empty without a mix."""
    (n_batch, n_token, _), (width, n_mixed) = projected.shape, taps.shape[1:]
    turn_t = 0 if cosine is None else cosine.stride(0)
    d_projected, d_taps, d_share = torch.empty_like(projected), [], taps.new_empty(0)
    d_first = projected.new_empty(first.shape if first is not None else 0)
    parts = heads_of_parts(d_query.shape[2], d_key.shape[2])
    for (start, n_part, is_value), d_z in zip(parts, (d_query, d_key, d_value), strict=True):
        d_z = d_z if d_z.stride(-1) == 1 else d_z.contiguous()
        d_y = d_z if is_value else d_z.new_empty(d_z.shape)
        own, d_own = (each[..., start * width :] for each in (projected, d_projected))
        strides = *projected.stride()[:2], *steps(first)
        grid, constants = grid_and_constants(n_batch, n_token, n_part, taps, is_value and first is not None)
        with torch.cuda.device_of(projected):
            d_taps_of_programs = taps.new_empty(n_batch, n_part, grid[1], n_mixed, width)
            gradient_kernel[grid](
                d_z, own, first, share, taps[start:], cosine, sine, d_y, d_taps_of_programs, *d_z.stride()[:3], *strides, turn_t,
                n_token, n_part, epsilon, scale if start == 0 else 1.0, NORM=not is_value,
                ROTATE=not is_value and cosine is not None, num_warps=WARPS["gradient"], **constants,
            )  # fmt: skip
            d_share = taps.new_empty(grid[0] * grid[1]) if constants["MIX"] else d_share
            backward_kernel[grid](
                d_y, own, first, share, taps[start:], d_own, d_first, d_share, *d_y.stride()[:3], *strides, n_token, n_part,
                num_warps=WARPS["backward"], **constants,
            )  # fmt: skip
        d_taps.append(d_taps_of_programs.sum((0, 2)).mT)
    return d_projected, torch.cat(d_taps), d_first, d_share.sum().reshape(1) if first is not None else d_share


@prepared_heads_backward.register_fake
def _(d_query, d_key, d_value, projected, taps, first, share, cosine, sine, epsilon, scale):
    d_first = projected.new_empty(first.shape if first is not None else 0)
    d_taps = torch.empty_like(taps, memory_format=torch.contiguous_format)
    return torch.empty_like(projected), d_taps, d_first, taps.new_empty(1 if first is not None else 0)


def keep(ctx, inputs, output) -> None:
    *tensors, n_head, epsilon, scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = epsilon, scale


def differentiate(ctx, d_query: Tensor, d_key: Tensor, d_value: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    d_projected, d_taps, d_first, d_share = prepared_heads_backward(d_query, d_key, d_value, *tensors, *ctx.numbers)
    mix = (None, None) if tensors[2] is None else (d_first, d_share)
    return d_projected, d_taps, *mix, None, None, None, None, None


prepared_heads.register_autograd(differentiate, setup_context=keep)
