"""Statistics of attention heads, for each query, and summed over the queries of each head.

Query i has scores s_ij over the visible keys j, and weights p_ij = softmax_j(s_ij). Its statistics are the log-sum-exp
ln Σ_j e^(s_ij), the largest logit max_j s_ij, the entropy -Σ_j p_ij ln p_ij, and the weights of the first key and of
the previous key. The entropy lies between 0 (one key has all the weight) and ln(visible keys) (all weights are equal).

B batch, T queries, S keys, H heads, G key/value heads (G divides H), any leading dimensions in front. All values are
fp32 or higher, in nats, and detached from the autograd graph. An implementation of attention returns
`AttentionStatistics`, one value per query. `HeadStatistics` holds sums per head, which can be added over micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from andrea.attention.mask import Mask, positions


@dataclass(frozen=True)
class AttentionStatistics:
    """Measurements of each query (row). A query that sees no key has log-sum-exp and largest logit -inf and entropy 0.

    Scores are as modified. A sink takes a share e^(sink - log-sum-exp) of the weight, `sink_mass`, and the keys share
    the rest: the log-sum-exp and the masses include the sink. The entropy does not: it is that of the keys' weights
    divided by their sum, so that it stays between 0 and ln(visible keys).
    """

    log_sum_exp: Tensor  # (..., T): ln(Σ_j e^(s_ij) + e^sink); without a sink ln Σ_j e^(s_ij)
    largest_logit: Tensor  # (..., T): max_j s_ij
    entropy_nats: Tensor  # (..., T): -Σ_j p_ij ln p_ij, from 0 to ln(visible keys)
    first_token_mass: Tensor  # (..., T): weight of key 0
    previous_token_mass: Tensor  # (..., T): weight of the key one position before the query, 0 if there is none
    visible_keys: Tensor  # int64, broadcastable to (..., T)
    sink_mass: Tensor | None = None  # (..., T): weight of the sink, 0 for a query that sees no key; None without a sink

    def per_head(self) -> dict[str, Tensor]:
        """For each head, shape (...): mean entropy, entropy as a share of its maximum, and largest logit.

        Queries that see no key do not count in the entropies. If a head has only such queries, its entropies are NaN.
        """
        seeing = self.visible_keys > 0
        rows = seeing.expand_as(self.entropy_nats).sum(-1)
        most = self.visible_keys.clamp(min=1).log().expand_as(self.entropy_nats).sum(-1)
        return {
            "entropy_nats": self.entropy_nats.sum(-1) / rows,
            "entropy_share": self.entropy_nats.sum(-1) / most,
            "largest_logit": self.largest_logit.amax(-1),
            **({} if self.sink_mass is None else {"sink_mass": self.sink_mass.sum(-1) / rows}),
        }


def statistics_of_scores(
    scores: Tensor, weights: Tensor, start: int | Tensor, sink: Tensor | None = None
) -> AttentionStatistics:
    """Statistics from scores (..., T, S), weights (..., T, S) and sink (H,). A masked score is -inf."""
    scores, weights = scores.detach(), weights.detach()
    first_mass, previous_mass = masses_of_weights(weights, start)
    largest = scores.amax(-1)
    visible = scores > -torch.inf
    blind = largest == -torch.inf
    shifted = torch.where(visible, scores - torch.where(blind, 0, largest)[..., None], 0)
    exponential = torch.where(visible, shifted.exp(), 0)
    total = torch.where(blind, 1, exponential.sum(-1))
    log_sum_exp, sink_mass = largest + total.log(), None
    if sink is not None:
        both = torch.logaddexp(log_sum_exp, sink.detach().to(log_sum_exp.dtype)[..., None])
        log_sum_exp = torch.where(blind, -torch.inf, both)
        sink_mass = sink_mass_of(log_sum_exp, sink)
    return AttentionStatistics(
        log_sum_exp=log_sum_exp,
        largest_logit=largest,
        entropy_nats=torch.where(blind, 0, total.log() - (exponential * shifted).sum(-1) / total),
        first_token_mass=first_mass,
        previous_token_mass=previous_mass,
        visible_keys=visible.sum(-1),
        sink_mass=sink_mass,
    )


def sink_mass_of(log_sum_exp: Tensor, sink: Tensor) -> Tensor:
    """The weight of the sink (H,), from the log-sum-exp (..., H, T) of keys and sink; 0 for a query that sees no key."""
    weight = (sink.detach().to(log_sum_exp.dtype)[..., None] - log_sum_exp).exp()
    return torch.where(log_sum_exp == -torch.inf, 0, weight)


class HeadStatistics(NamedTuple):
    """Sums over the queries of each head, fp32: (B, H) for a layer, (layers, H) for a model. `merged` adds two of them."""

    rows: Tensor  # number of queries that see a key
    entropy: Tensor  # Σ entropy, nats
    most_entropy: Tensor  # Σ ln(visible keys), nats: the largest possible entropy
    largest_logit: Tensor  # a maximum, not a sum
    first_rows: Tensor  # number of queries that see key 0 and stand after it
    first_mass: Tensor  # Σ weight of key 0 over these queries
    previous_rows: Tensor  # number of queries that see the key one position before them
    previous_mass: Tensor  # Σ weight of that key over these queries
    # None without gates: Σ gate over the queries that see a key, mean over a head's channels
    gate: Tensor | None = None
    # None without sinks: Σ weight of the sink over the queries that see a key
    sink_mass: Tensor | None = None

    def merged(self, other: HeadStatistics) -> HeadStatistics:
        """The statistics of both sets of queries together."""
        summed = HeadStatistics(*(None if one is None else one + two for one, two in zip(self, other, strict=True)))
        return summed._replace(largest_logit=torch.maximum(self.largest_logit, other.largest_logit))

    @classmethod
    def of_layers(cls, layers: list[HeadStatistics], counted: Tensor | None = None) -> HeadStatistics:
        """The sums (layers, H) of a model, from the sums (B, H) of each layer.

        counted (B,) bool: the sequences to include; all if None.
        """
        stacked = cls(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*layers, strict=True)))
        if counted is None:
            counted = torch.ones(stacked.rows.shape[1], dtype=torch.bool, device=stacked.rows.device)
        parts = stacked._asdict().items()
        sums = {name: None if part is None else torch.where(counted[:, None], part, 0).sum(1) for name, part in parts}
        sums["largest_logit"] = torch.where(counted[:, None], stacked.largest_logit, -torch.inf).amax(1)
        return cls(**sums)  # not `_replace`, whose result torch 2.11 cannot return from a compiled function

    def figures(self) -> dict[str, Tensor]:
        """The logged values of each head, fp32, in the shape of the sums; NaN where a head has no query to average over.

        `gate_mean`, from 0 (closed) to 2, is there for heads with gates only, and `sink_mass` for heads with sinks only.
        """
        gate = {} if self.gate is None else {"gate_mean": self.gate / self.rows}
        sink = {} if self.sink_mass is None else {"sink_mass": self.sink_mass / self.rows}
        return {
            "entropy_nats": self.entropy / self.rows,
            "entropy_share": self.entropy / self.most_entropy,
            "largest_logit": self.largest_logit,
            "first_token_mass": self.first_mass / self.first_rows,
            "previous_token_mass": self.previous_mass / self.previous_rows,
            **gate,
            **sink,
        }


@torch.no_grad()
def head_statistics(
    rows: AttentionStatistics, mask: Mask | None, start: int | Tensor, n_key: int, gate: Tensor | None = None
) -> HeadStatistics:
    """Sum the statistics of rows (B, H, T) over T: (B, H). gate: the heads' gates, (B, H, T, 1 or D)."""
    shape = rows.entropy_nats.shape
    position = positions(shape[-1], start, rows.entropy_nats.device)

    def of_heads(per_row: Tensor) -> Tensor:
        return per_row.expand(shape).float().sum(2)

    sees_first = sees(mask, torch.zeros_like(position), position, n_key) & (position > 0)
    sees_previous = sees(mask, position - 1, position, n_key)
    return HeadStatistics(
        rows=of_heads(rows.visible_keys > 0),
        entropy=of_heads(rows.entropy_nats),
        most_entropy=of_heads(rows.visible_keys.clamp(min=1).log()),
        largest_logit=rows.largest_logit.float().amax(2),
        first_rows=of_heads(sees_first),
        first_mass=of_heads(torch.where(sees_first, rows.first_token_mass, 0)),
        previous_rows=of_heads(sees_previous),
        previous_mass=of_heads(torch.where(sees_previous, rows.previous_token_mass, 0)),
        gate=None if gate is None else of_heads(torch.where(rows.visible_keys > 0, gate.float().mean(-1), 0)),
        sink_mass=None if rows.sink_mass is None else of_heads(rows.sink_mass),
    )


def sees(mask: Mask | None, key_position: Tensor, position: Tensor, n_key: int) -> Tensor:
    """Whether the query at position[i] sees the key at key_position[i]; both positions (..., T) -> bool (..., T)."""
    exists = (key_position >= 0) & (key_position < n_key)
    if mask is None:
        return exists
    interval = mask.interval(position, n_key)
    if interval is not None:
        return exists & (interval[0] <= key_position) & (key_position < interval[1])
    written_out = mask.visible(position[..., None], torch.arange(n_key, device=position.device))
    index = key_position.clamp(0, n_key - 1)[..., None]
    return exists & written_out.gather(-1, index.expand(*written_out.shape[:-1], 1))[..., 0]


def masses_of_weights(weights: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
    """From weights (..., T, S), the weights (..., T) of two keys: key 0, and the key one position before each query."""
    n_query, n_key = weights.shape[-2:]
    previous = positions(n_query, start, weights.device) - 1
    index = previous.clamp(0, n_key - 1)[..., None].expand(*weights.shape[:-1], 1)
    exists = (previous >= 0) & (previous < n_key)
    return weights[..., 0], torch.where(exists, weights.gather(-1, index)[..., 0], 0)


def sink_gradient(sink: Tensor, log_sum_exp: Tensor, delta: Tensor) -> Tensor:
    """sink (H,), log_sum_exp and delta (B, H, T), fp32 -> the gradient of the sink (H,).

    A sink has no value, so the softmax's gradient p (dp - delta) is -p delta for it; delta is defined in attend_triton.py.
    Terms of both signs are summed over all queries, in fp64, so that the sum adds no error to that of its terms.
    """
    return -(sink_mass_of(log_sum_exp, sink) * delta).double().sum((0, 2)).to(sink.dtype)
