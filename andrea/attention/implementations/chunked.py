"""The additive function without its (T, S, n) tensor of hidden values.

`Additive.scores` keeps tanh(A q_i + B k_j) of every pair (i, j) for the backward pass. Here the queries are processed
in chunks. Only A q, B k and w are kept, and the backward pass computes the tanh of each chunk again.
T queries, S keys, hidden width n.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from andrea.attention.compatibility import Additive, Case, Result
from andrea.attention.implementations import reference

HIDDEN_AT_A_TIME = 2**22  # entries in the (..., rows, S, n) tensor of one chunk: 16 MiB in fp32


def refusal(case: Case) -> str | None:
    return None if type(case.compatibility) is Additive else "it supports the additive function only"


def run(case: Case) -> Result:
    return reference.run(case, functools.partial(additive_scores, case.compatibility))


def additive_scores(compatibility: Additive, query: Tensor, key: Tensor) -> Tensor:
    """query (..., T, d_q), key (..., S, d_k) -> scores (..., T, S), the same as `compatibility.scores`."""
    query, key = compatibility.transformed(query, key)
    return ScoresInChunks.apply(query, key, compatibility.weight.to(query.dtype))


class ScoresInChunks(torch.autograd.Function):
    """score_ij = Σ_n w_n tanh(a_in + b_jn), for a (..., T, n), b (..., S, n) and w (..., n)."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, w)
        return torch.cat([torch.einsum("...tsn,...n->...ts", hidden, w) for _, hidden in chunks(a, b)], dim=-2)

    @staticmethod
    def backward(ctx, d_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dw = Σ_ij g_ij h_ij, da_i = Σ_j e_ij and db_j = Σ_i e_ij.

        Here g = d_scores, h_ij = tanh(a_i + b_j) and e_ij = g_ij w (1 - h_ij²).
        """
        a, b, w = ctx.saved_tensors
        d_a, d_b = [], torch.zeros_like(b)
        d_w = torch.zeros((*d_scores.shape[:-2], w.shape[-1]), dtype=w.dtype, device=w.device)
        for rows, hidden in chunks(a, b):
            upstream = d_scores[..., rows, :]
            d_w = d_w + torch.einsum("...tsn,...ts->...n", hidden, upstream)
            slope = 1 - hidden.square()
            d_a.append(torch.einsum("...tsn,...ts->...tn", slope, upstream) * w[..., None, :])
            d_b = d_b + torch.einsum("...tsn,...ts->...sn", slope, upstream) * w[..., None, :]
        return torch.cat(d_a, dim=-2), d_b, d_w.sum_to_size(w.shape)


def chunks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """For each chunk of queries i, yield the slice of its rows of `a`, and tanh(a_i + b_j) (..., rows, S, n)."""
    numbers_in_a_row = max(1, b.numel())
    size = max(1, HIDDEN_AT_A_TIME // numbers_in_a_row)
    for begin in range(0, a.shape[-2], size):
        rows = slice(begin, begin + size)
        yield rows, torch.tanh(a[..., rows, None, :] + b[..., None, :, :])
