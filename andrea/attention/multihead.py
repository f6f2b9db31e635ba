"""Multi-head attention: project, place, attend, merge.

B batch, T queries, S keys, H heads, D = d_head; x (B, T, d_model).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from andrea.attention.attend import attend
from andrea.attention.cache import LayerCache
from andrea.attention.compatibility import Compatibility, DotProduct
from andrea.attention.mask import Mask

PLAIN = DotProduct()
Place = Callable[[Tensor], Tensor]  # puts positions into queries or keys (B, H, T, D)


class MultiHeadAttention(nn.Module):
    """Self-attention (no mask), causal self-attention (mask=causal()) or cross-attention (a context is passed in).

    The query is what a position looks for, the key is what it offers, the value is what it hands over.
    d_context: width of the vectors that keys and values come from; d_model when left out.
    qk_norm_epsilon: a number makes each head's queries and keys RMS-normalised (Henry et al. 2020, arXiv 2010.04245).
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        *,
        compatibility: Compatibility,
        mask: Mask | None = None,
        d_context: int | None = None,
        bias: bool = False,
        qk_norm_epsilon: float | None = None,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        if d_model % n_head:
            raise ValueError(f"n_head={n_head} does not divide d_model={d_model}: the head width must be whole")
        self.d_head = d_model // n_head
        self.query = nn.Linear(d_model, d_model, bias)
        self.key = nn.Linear(d_context or d_model, d_model, bias)
        self.value = nn.Linear(d_context or d_model, d_model, bias)
        self.output = nn.Linear(d_model, d_model, bias)
        self.compatibility = compatibility
        self.mask = mask
        self.qk_norm_epsilon = qk_norm_epsilon
        self.implementation = implementation

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        place: Place | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B, T, d_model), context (B, S, d_context), x itself when left out -> (B, T, d_model).

        place: applied to the lowered query and key; rotary positions are. cache: earlier keys and values.
        """
        context = x if context is None else context
        query, key, value = self.heads(self.query(x)), self.heads(self.key(context)), self.heads(self.value(context))
        if self.qk_norm_epsilon is not None:
            query, key = (rms_norm(each, (self.d_head,), eps=self.qk_norm_epsilon) for each in (query, key))
        query, key = self.compatibility.lower(query, key)
        if place is not None:
            query, key = place(query), place(key)
        start = None
        if cache is not None:
            key, value, start = *cache.append(key, value), cache.length
        how = {"compatibility": PLAIN, "mask": self.mask, "start": start, "implementation": self.implementation}
        retrieved = attend(query, key, value, **how)  # (B, H, T, D)
        return self.output(retrieved.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, H, T, D)."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
