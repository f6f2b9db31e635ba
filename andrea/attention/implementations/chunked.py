"""Scores of the additive function without its (T, S, n) tensor of hidden values.

The readable line, `Additive.scores`, keeps tanh(A q_i + B k_j) of every pair for the backward pass. Here queries come
in chunks, and the backward pass computes each chunk's tanh again: what is kept is A q, B k and w.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from andrea.attention.compatibility import Additive

HIDDEN_AT_A_TIME = 2**22  # numbers in a chunk's (..., chunk, S, n): 16 MiB in fp32


def additive_scores(compatibility: Additive, query: Tensor, key: Tensor) -> Tensor:
    """query (..., T, d_q), key (..., S, d_k) -> scores (..., T, S), as `compatibility.scores` gives them."""
    query, key = compatibility.transformed(query, key)
    return ScoresInChunks.apply(query, key, compatibility.weight.to(query.dtype))


class ScoresInChunks(torch.autograd.Function):
    """score_ij = Σ_n w_n tanh(a_in + b_jn), of a (..., T, n), b (..., S, n) and w (..., n)."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, w)
        return torch.cat([torch.einsum("...tsn,...n->...ts", hidden, w) for _, hidden in chunks(a, b)], dim=-2)

    @staticmethod
    def backward(ctx, d_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With h = tanh(a_i + b_j): dw = Σ_ij g_ij h; da_i = Σ_j g_ij w (1 - h²); db_j the same summed over i."""
        a, b, w = ctx.saved_tensors
        d_a, d_b, d_w = (
            [],
            torch.zeros_like(b),
            torch.zeros((*d_scores.shape[:-2], w.shape[-1]), dtype=w.dtype, device=w.device),
        )
        for rows, hidden in chunks(a, b):
            upstream = d_scores[..., rows, :]
            d_w = d_w + torch.einsum("...tsn,...ts->...n", hidden, upstream)
            slope = 1 - hidden.square()
            d_a.append(torch.einsum("...tsn,...ts->...tn", slope, upstream) * w[..., None, :])
            d_b = d_b + torch.einsum("...tsn,...ts->...sn", slope, upstream) * w[..., None, :]
        return torch.cat(d_a, dim=-2), d_b, d_w.sum_to_size(w.shape)


def chunks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, tanh(a_i + b_j) (..., rows, S, n)), chunk by chunk."""
    of_one_row = max(1, b.numel())
    size = max(1, HIDDEN_AT_A_TIME // of_one_row)
    for begin in range(0, a.shape[-2], size):
        rows = slice(begin, begin + size)
        yield rows, torch.tanh(a[..., rows, None, :] + b[..., None, :, :])
