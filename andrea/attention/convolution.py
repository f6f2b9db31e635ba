"""A short convolution over the tokens, for the queries, keys and values of each head.

A key that mixes the token before its own lets a single layer find what followed an earlier copy of the present token; an
induction head otherwise needs two layers (KV shifting attention, Xu et al. 2024, arXiv 2411.19574). Here each channel of
queries, keys and values has weights of its own, as in Primer's multi-dconv-head attention (So et al. 2021, arXiv
2109.08668, section 4.2).

B sequences, H heads, T tokens, D = d_head, K tokens that are mixed: a token and the K - 1 before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from andrea.attention.kernels import convolve_cpp


def convolve(x: Tensor, taps: Tensor, before: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """`convolve_readable`, or our kernel where it serves: bf16 on a CPU, from the first token on, in one document."""
    if before is None and place is None and convolve_cpp.serves(x, taps.shape[-1]):
        return convolve_cpp.native_convolution(x, taps.float())
    return convolve_readable(x, taps, before, place)


def convolve_readable(x: Tensor, taps: Tensor, before: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """x (B, H, T, D), taps (H, D, K) -> (B, H, T, D): y_t = x_t + Σ_i taps[..., i] · x_{t-i}, over i = 0 … K - 1.

    Taps of zero change nothing. before: the K - 1 tokens in front of x, (B, H, K - 1, D); zeros if None. place: (B, T), the
    number of tokens between each token and the first of its document. A token mixes none of another document.

    >>> convolve_readable(torch.tensor([[[[1.0], [10.0], [100.0]]]]), torch.tensor([[[0.0, 0.5]]])).flatten()
    tensor([  1.0000,  10.5000, 105.0000])
    """
    n_token, n_mixed = x.shape[2], taps.shape[2]
    padded = pad(x, (0, 0, n_mixed - 1, 0)) if before is None else torch.cat([before, x], dim=2)
    weights = taps.to(x.dtype)[:, None].unbind(-1)  # K of (H, 1, D)
    y = x + x * weights[0]
    for distance in range(1, n_mixed):
        first = n_mixed - 1 - distance
        earlier = padded[:, :, first : first + n_token]
        if place is not None:
            earlier = earlier.masked_fill((place < distance)[:, None, :, None], 0.0)
        y = y + earlier * weights[distance]
    return y
