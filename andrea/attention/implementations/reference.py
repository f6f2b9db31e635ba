"""The textbook formula of attention, with names for all intermediate results.

This implementation serves every device and every compatibility function, and supports gradients of gradients. It is
written to be read, not to be fast. Every other implementation is tested against it.
T queries, S keys, H query heads, G key/value heads (G divides H), widths d_q, d_k, d_v; any leading dimensions in
front.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention.compatibility import Case, Compatibility, Result
from andrea.attention.grouped_query import repeated_for_query_heads
from andrea.attention.mask import Mask, positions, visible_keys
from andrea.attention.modifiers import ScoreModifiers
from andrea.attention.statistics import statistics_of_scores

Scores = Callable[[Tensor, Tensor], Tensor]  # query (..., T, d_q), key (..., S, d_k) -> (..., T, S)


@dataclass(frozen=True)
class Intermediates:
    scores: Tensor  # (..., T, S), as modified, -inf where masked
    weights: Tensor  # (..., T, S), the softmax of the scores; with a sink they sum to less than 1
    output: Tensor  # (..., T, d_v)


def refusal(case: Case) -> None:
    """Always None, because this implementation serves every case."""
    return None


def run(case: Case, scores_of: Scores | None = None) -> Result:
    start, tensors = case.first_position, (case.query, case.key, case.value)
    made = attend_reference(*tensors, case.compatibility, case.mask, start, scores_of, case.modifiers, case.sink)
    if not case.statistics:
        return made.output, None
    return made.output, statistics_of_scores(made.scores, made.weights, start, case.sink)


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Compatibility,
    mask: Mask | None,
    start: int | Tensor,
    scores_of: Scores | None = None,
    modifiers: ScoreModifiers | None = None,
    sink: Tensor | None = None,
) -> Intermediates:
    """output_i = Σ_j softmax_j(mask(f(q_i, k_j))) v_j (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    query (..., H, T, d_q), key (..., G, S, d_k), value (..., G, S, d_v). The softmax is computed in fp32 or higher. A
    query that sees no key gets an output of zeros. start: position of the first query among the keys.
    scores_of: computes the scores in place of `compatibility.scores`. modifiers, sink: as in `Case`.
    """
    key, value = repeated_for_query_heads(key, query), repeated_for_query_heads(value, query)
    # torch.compile cannot tell in torch 2.11 whether a partial is true.
    scores = (compatibility.scores if scores_of is None else scores_of)(query, key)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if modifiers is not None:
        query_position = positions(query.shape[-2], start, query.device)[..., None]
        scores = modifiers.modified(scores, query_position, torch.arange(key.shape[-2], device=query.device))
    if mask is None:
        weights = softmax_of(scores, sink)
    else:
        visible = visible_keys(mask, query.shape[-2], key.shape[-2], start, query.device)
        nothing_visible = ~visible.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~visible, -torch.inf)
        # The softmax of a row of -inf is NaN, and so is its gradient. Such a row enters the softmax as zeros, and its
        # weights are set to zero afterwards.
        weights = softmax_of(scores.masked_fill(nothing_visible, 0), sink).masked_fill(nothing_visible, 0)
    return Intermediates(scores, weights, weights.to(value.dtype) @ value)


def softmax_of(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The softmax of scores (..., H, T, S): e^(s_j) / (Σ_j' e^(s_j') + e^sink), with a sink (H,), else without e^sink."""
    if sink is None:
        return scores.softmax(dim=-1)
    column = sink.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
