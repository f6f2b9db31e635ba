"""Multi-head attention: project, place, attend, merge.

B batch, T queries, S keys, H heads, G key/value heads (G divides H), D = d_head; x (B, T, d_model).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from andrea.attention.attend import attend
from andrea.attention.cache import LayerCache
from andrea.attention.compatibility import Compatibility, DotProduct
from andrea.attention.mask import Mask
from andrea.attention.statistics import HeadStatistics, head_statistics

PLAIN = DotProduct()
Place = Callable[[Tensor], Tensor]  # puts positions into queries or keys (B, H, T, D)


class MultiHeadAttention(nn.Module):
    """Self-attention (no mask), causal self-attention (mask=causal()) or cross-attention (a context is passed in).

    The query is what a position looks for, the key is what it offers, the value is what it hands over.
    d_context: width of the vectors that keys and values come from; d_model when left out.
    n_kv_head: heads of keys and values, each shared by n_head / n_kv_head query heads (Ainslie et al. 2023, arXiv
    2305.13245); n_head when left out.
    qk_norm_epsilon: a number makes each head's queries and keys RMS-normalised (Henry et al. 2020, arXiv 2010.04245).
    value_residual: this layer mixes a learned share of the first layer's values into its own (Zhou et al. 2024, arXiv
    2410.17897), which whoever calls it hands in: `layer(x, first_value=first_layer.values(its_x))`.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        *,
        compatibility: Compatibility,
        mask: Mask | None = None,
        d_context: int | None = None,
        n_kv_head: int | None = None,
        bias: bool = False,
        qk_norm_epsilon: float | None = None,
        value_residual: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        if d_model % n_head:
            raise ValueError(f"n_head={n_head} does not divide d_model={d_model}: the head width must be whole")
        if n_head % n_kv_head:
            raise ValueError(f"n_kv_head={n_kv_head} does not divide n_head={n_head}: each is shared by as many heads")
        self.d_head = d_model // n_head
        self.query = nn.Linear(d_model, d_model, bias)
        self.key = nn.Linear(d_context or d_model, n_kv_head * self.d_head, bias)
        self.value = nn.Linear(d_context or d_model, n_kv_head * self.d_head, bias)
        self.output = nn.Linear(d_model, d_model, bias)
        # Its logistic function is the first layer's share: half of the values, to begin with.
        self.value_mix = nn.Parameter(torch.zeros(1)) if value_residual else None
        self.compatibility = compatibility
        self.mask = mask
        self.qk_norm_epsilon = qk_norm_epsilon
        self.implementation = implementation

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        first_value: Tensor | None = None,
        place: Place | None = None,
        packing: Mask | None = None,
        cache: LayerCache | None = None,
        observed: list[HeadStatistics] | None = None,
    ) -> Tensor:
        """x (B, T, d_model), context (B, S, d_context), x itself when left out -> (B, T, d_model).

        first_value: the first layer's values (B, G, S, D), with value_residual. place: applied to the lowered query and
        key; rotary positions are. packing: a mask of this batch, joined with the module's own. cache: earlier keys and
        values; with it another implementation than the one named may serve, because T and S then differ from step to
        step. observed: a list to which the heads' statistics are appended.
        """
        retrieved = self.retrieve(
            x, context, first_value=first_value, place=place, packing=packing, cache=cache, observed=observed
        )  # (B, H, T, D)
        return self.output(retrieved.transpose(1, 2).flatten(2))

    def retrieve(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        first_value: Tensor | None = None,
        place: Place | None = None,
        packing: Mask | None = None,
        cache: LayerCache | None = None,
        observed: list[HeadStatistics] | None = None,
    ) -> Tensor:
        """What each head takes from the values, (B, H, T, D), before W_O."""
        query, key, value, compatibility = self.project(x, context, place, first_value)
        mask = self.mask if packing is None else packing if self.mask is None else self.mask & packing
        start, implementation = None, self.implementation
        if cache is not None:
            key, value, start = *cache.append(key, value), cache.length
            if isinstance(start, Tensor) and start.ndim == 1:
                start = start[:, None, None]  # for heads and queries
            implementation = "reference" if implementation == "reference" else "auto"
        how = {"compatibility": compatibility, "mask": mask, "start": start}
        if observed is None:
            return attend(query, key, value, **how, implementation=implementation)
        measures = ("triton", "reference", "chunked")
        implementation = implementation if implementation in measures else "auto"
        output, rows = attend(query, key, value, **how, implementation=implementation, statistics=True)
        start = key.shape[-2] - query.shape[-2] if start is None else start
        observed.append(head_statistics(rows, mask, start, key.shape[-2]))
        return output

    def project(
        self, x: Tensor, context: Tensor | None, place: Place | None, first_value: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Compatibility]:
        """Query (B, H, T, D), key and value (B, G, S, D), and the function that scores them: the plain dot product,
        unless the compatibility function has no lowered form.
        """
        context = x if context is None else context
        query, key = self.heads(self.query(x)), self.heads(self.key(context))
        value = self.mixed(self.values(context), first_value)
        if self.qk_norm_epsilon is not None:
            query, key = (rms_norm(each, (self.d_head,), eps=self.qk_norm_epsilon) for each in (query, key))
        if not self.compatibility.lowers:
            if place is not None:
                raise ValueError(
                    f"{type(self.compatibility).__name__} has no lowered form that could be turned by rotary positions: "
                    f"use learned positions or none"
                )
            return query, key, value, self.compatibility
        query, key = self.compatibility.lowered(query, key)
        if place is not None:
            query, key = place(query), place(key)
        return query, key, value, PLAIN

    def values(self, context: Tensor) -> Tensor:
        """context (B, S, d_context) -> this layer's own values (B, G, S, D)."""
        return self.heads(self.value(context))

    def mixed(self, value: Tensor, first_value: Tensor | None) -> Tensor:
        """(B, G, S, D) each: with value_residual, the learned share of the first layer's values and the rest of these."""
        if (first_value is None) != (self.value_mix is None):
            raise ValueError("value_residual=True takes the first layer's values, and nothing else does: first_value=…")
        if first_value is None:
            return value
        return torch.lerp(value, first_value, torch.sigmoid(self.value_mix).to(value.dtype))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, H, T, D)."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    @property
    def output_by_head(self) -> Tensor:
        """W_O of each head, a view (H, d_model, D) of the output's weight: what the head writes is W_O^(h) z^(h).

        The sum over heads (and the bias) is what `forward` returns: concatenating comes to the same.
        """
        return self.output.weight.unflatten(1, (-1, self.d_head)).transpose(0, 1)
