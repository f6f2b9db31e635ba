"""Attention of one new token per sequence, from the products of W_Q, W_K and W_V on: two launches for a layer.

B sequences, H query heads, G key/value heads, N = H + 2 G, D their width, S capacity of the cache, K tokens that the convolution
mixes. The readable twin is `MultiHeadAttention` without this operator: `project`, `LayerCache.append` and `attend`.

One query per head is too little work for a GPU, so the filled keys of a head are split among programs (Dao et al. 2023, "Flash-
Decoding"). How many keys each one reads follows from the length, which only the device knows: the same launch, recorded in a CUDA
graph, reads few keys of a short text. Every program computes its query by itself. The first of a head starts with the new key and
value, which it computes and appends to the cache; so no program waits for another. A second kernel joins the splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea.attention.kernels.attend_triton import LOG2_E, LOWEST
from andrea.attention.kernels.heads_triton import inverse_rms, load_weight

BLOCK, WARPS = 32, 4  # keys that a program reads at once
PROGRAMS, MOST_SPLITS = 256, 16  # wanted at least, to fill a GPU; of a head at most


@triton.jit
def convolved(m, rows, taps, length, columns, D: tl.constexpr, K: tl.constexpr):
    """y of the new token: its m, and the tokens before it from the cache `rows` (S, D)."""
    y = m
    if K > 0:
        y *= load_weight(taps, columns, 0, K)
    for i in tl.static_range(1, K):
        place = (length - i) * D + columns  # below 0 in front of the first token
        before = tl.load(rows + place, mask=place >= 0, other=0.0)
        y += before.to(tl.float32) * load_weight(taps, columns, i, K)
    return y


@triton.jit
def prepared(
    x, rows, taps, cosine, sine, length, epsilon, scale,
    D: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """A query or key: convolved, normed and rotated. Its two halves (1, D/2), whose entries are the rotation's pairs."""
    low = tl.arange(0, D // 2)
    high = low + D // 2
    y_low = convolved(tl.load(x + low).to(tl.float32), rows, taps, length, low, D, K)[None, :]
    y_high = convolved(tl.load(x + high).to(tl.float32), rows, taps, length, high, D, K)[None, :]
    factor = scale
    if NORM:
        factor = inverse_rms(y_low, y_high, epsilon, D) * scale
    y_low, y_high = y_low * factor, y_high * factor
    if ROTATE:
        c, s = tl.load(cosine + low)[None, :], tl.load(sine + high)[None, :]
        y_low, y_high = y_low * c - y_high * s, y_high * c + y_low * s
    return y_low, y_high


@triton.jit
def split_kernel(
    x, first, mix, taps, cosine, sine, keys, values, rows, lengths, z, sums, f_b, f_h, turn_b, length_b, S, window,
    epsilon, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
    MIX: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One split of one head's keys: the weighted sum of values z, the largest score and the denominator."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    g, N = h // (H // G), H + 2 * G
    length = tl.load(lengths + b * length_b)
    x += b * N * D
    rows += b * N * S * D
    keys += (b * G + g) * S * D
    values += (b * G + g) * S * D
    cosine += b * turn_b
    sine += b * turn_b
    low, columns = tl.arange(0, D // 2), tl.arange(0, D)
    q_low, q_high = prepared(
        x + h * D, rows + h * S * D, taps + h * D * K, cosine, sine, length, epsilon, scale, D, K, NORM, ROTATE
    )
    z_sum, m, total = tl.zeros([D], tl.float32), tl.full([1], LOWEST, tl.float32), tl.zeros([1], tl.float32)
    if split == 0:
        n = H + g  # the key's head of x, rows and taps; the value's is n + G
        k_low, k_high = prepared(
            x + n * D, rows + n * S * D, taps + n * D * K, cosine, sine, length, epsilon, 1.0, D, K, NORM, ROTATE
        )
        kept = keys.dtype.element_ty
        k_low, k_high = k_low.to(kept), k_high.to(kept)
        own = tl.load(x + (n + G) * D + columns).to(tl.float32)
        if MIX:
            other = tl.load(first + b * f_b + g * f_h + columns).to(tl.float32)
            own = (own + tl.sigmoid(tl.load(mix).to(tl.float32)) * (other - own)).to(kept).to(tl.float32)
        v = convolved(own, rows + (n + G) * S * D, taps + (n + G) * D * K, length, columns, D, K).to(kept)
        m = tl.sum(q_low * k_low.to(tl.float32), 1) + tl.sum(q_high * k_high.to(tl.float32), 1)
        total = tl.full([1], 1.0, tl.float32)
        z_sum = v.to(tl.float32)
        here = length * D
        if K > 0:  # for the convolution of the tokens after this one
            tl.store(rows + h * S * D + here + columns, tl.load(x + h * D + columns))
        if h % (H // G) == 0:
            tl.store(keys + here + low[None, :], k_low)
            tl.store(keys + here + low[None, :] + D // 2, k_high)
            tl.store(values + here + columns, v)
            if K > 0:
                tl.store(rows + n * S * D + here + columns, tl.load(x + n * D + columns))
                tl.store(rows + (n + G) * S * D + here + columns, own.to(kept))
    oldest = tl.maximum(length + 1 - window, 0)
    n_key = tl.cdiv(tl.cdiv(length - oldest, SPLITS), BLOCK) * BLOCK  # of each split
    begin = oldest + split * n_key
    stop = tl.minimum(begin + n_key, length)
    for n0 in range(begin, stop, BLOCK):
        key = n0 + tl.arange(0, BLOCK)
        inside = (key < stop)[:, None]
        k = keys + key[:, None] * D + low[None, :]
        s = tl.sum(tl.load(k, mask=inside, other=0.0).to(tl.float32) * q_low, 1)
        s += tl.sum(tl.load(k + D // 2, mask=inside, other=0.0).to(tl.float32) * q_high, 1)
        s = tl.where(key < stop, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p, shrink = tl.exp2((s - m_new) * LOG2_E), tl.exp2((m - m_new) * LOG2_E)
        v = tl.load(values + key[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        z_sum = z_sum * shrink + tl.sum(p[:, None] * v, 0)
        total = total * shrink + tl.sum(p, 0)
        m = m_new
    place = bh * SPLITS + split
    tl.store(z + place * D + columns, z_sum)
    one = tl.arange(0, 1)
    tl.store(sums + place * 2 + one, m)
    tl.store(sums + place * 2 + 1 + one, total)


@triton.jit
def join_kernel(z, sums, output, D: tl.constexpr, SPLITS: tl.constexpr):
    """The output of one head from its splits."""
    place, columns = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS), tl.arange(0, D)
    m, total = tl.load(sums + place * 2), tl.load(sums + place * 2 + 1)
    weight = tl.exp2((m - tl.max(m, 0)) * LOG2_E)
    of_splits = tl.load(z + place[:, None] * D + columns[None, :])
    joined = tl.sum(of_splits * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(output + tl.program_id(0) * D + columns, joined.to(output.dtype.element_ty))


def splits_of(n_batch: int, n_head: int) -> int:
    """Programs for each head: a power of two."""
    wanted = max(1, min(MOST_SPLITS, PROGRAMS // (n_batch * n_head)))
    return 1 << (wanted.bit_length() - 1)


@torch.library.custom_op("andrea::decoded_heads", mutates_args=("keys", "values", "rows"))
def decoded_heads(
    projected: Tensor,
    taps: Tensor | None,
    first: Tensor | None,
    mix: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    keys: Tensor,
    values: Tensor,
    rows: Tensor | None,
    length: Tensor,
    n_head: int,
    window: int,
    epsilon: float | None,
    scale: float,
) -> Tensor:
    """What one new token's heads retrieve, (B, 1, H, D). The cache gets its key and value, and its row with a convolution.

    projected (B, 1, N D): the products with W_Q, W_K and W_V, side by side. taps (N, D, K); None: no convolution. first (B, G, 1,
    D): the first layer's values, of which the values get the share sigmoid(mix), mix (1,); None: no mix. cosine, sine: (1, D), or
    (B, 1, 1, D) for sequences of different lengths; None: no rotation. keys, values (B, G, S, D), rows (B, N, S, D) or None:
    the cache, of which the first `length` tokens are filled; length: int64, 0-d or (B,). n_head: H. window: keys that a query
    sees. epsilon: of the norm; None: no norm. scale: the queries' factor after it. D is a power of two.
    """
    n_batch, n_group, capacity, width = keys.shape
    n_split, n_mixed = splits_of(n_batch, n_head), 0 if taps is None else taps.shape[2]
    for each in (projected, taps, keys, values, rows):
        assert each is None or each.is_contiguous(), each.stride()
    assert first is None or first.stride(-1) == 1, first.stride()
    turn = 0 if cosine is None or cosine.ndim == 2 else cosine.stride(0)
    sums = projected.new_empty(n_batch, n_head, n_split, 2, dtype=torch.float32)
    z = projected.new_empty(n_batch, n_head, n_split, width, dtype=torch.float32)
    output = projected.new_empty(n_batch, 1, n_head, width)

    def unless_none(tensor: Tensor | None) -> Tensor:
        return projected if tensor is None else tensor  # any pointer, because the kernel does not read it

    with torch.cuda.device_of(projected):  # Triton alone would launch on the current GPU
        split_kernel[n_batch * n_head, n_split](
            projected, first, mix, unless_none(taps), unless_none(cosine), unless_none(sine),
            keys, values, unless_none(rows), length, z, sums,
            *((0, 0) if first is None else first.stride()[:2]), turn, length.stride(0) if length.ndim else 0, capacity, window,
            0.0 if epsilon is None else epsilon, scale, H=n_head, G=n_group, D=width, K=n_mixed, SPLITS=n_split,
            MIX=first is not None, NORM=epsilon is not None, ROTATE=cosine is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        join_kernel[(n_batch * n_head,)](z, sums, output, D=width, SPLITS=n_split, num_warps=1)
    return output


@decoded_heads.register_fake
def _(projected, taps, first, mix, cosine, sine, keys, values, rows, length, n_head, window, epsilon, scale):
    return projected.new_empty(len(projected), 1, n_head, keys.shape[3])
