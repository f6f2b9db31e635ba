"""Value embeddings: every layer's values get a contribution that depends on the token itself, not on what x has become.

B sequences, T tokens, G key/value heads, D = d_head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VALUE_EMBEDDINGS = ("projection", "table")


class ValueEmbedding(nn.Module):
    """λ E(source), (B, T, G D), which one layer adds to its values. λ is one learned number of the layer.

    kind "projection": E is a matrix, and the source is the normed input of the first layer, (B, T, d_model): a later layer
    can hand over the token as it was read (a value residual without the first layer's own matrix: Zhou et al. 2024, arXiv
    2410.17897, and the projections of NanoGPT Slowrun). kind "table": E is an embedding of its own, and the source is the
    token ids, (B, T) int64 (value embeddings of modded-nanogpt; Jordan et al. 2024). A table costs no product, but V G D
    parameters.
    """

    def __init__(self, kind: str, d_model: int, n_vocab: int, width: int) -> None:
        """width: G D. Raises ValueError for an unknown kind."""
        super().__init__()
        if kind not in VALUE_EMBEDDINGS:
            raise ValueError(f"kind={kind!r} is unknown; allowed: {', '.join(VALUE_EMBEDDINGS)}")
        self.projection = nn.Linear(d_model, width, bias=False) if kind == "projection" else None
        self.table = nn.Embedding(n_vocab, width) if kind == "table" else None
        self.mix = nn.Parameter(torch.ones(1))
        # Zeros add nothing at first. andrea-nano (140 steps, one seed, bits per byte) ends from zeros and λ = 1 at 1.604 with
        # projections and 1.606 with tables, from drawn weights and λ = 1/2 at 1.601 and 1.618, from these and λ = 0 at 1.631
        # and 1.621; without value embeddings at 1.632.
        nn.init.zeros_(self.embedding_weight)

    @property
    def embedding_weight(self) -> nn.Parameter:
        return self.projection.weight if self.table is None else self.table.weight

    def forward(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """source (B, T, d_model) or (B, T) -> (B, T, G D) of type `dtype`."""
        embedded = self.projection(source) if self.table is None else self.table(source)
        return self.mix.to(dtype) * embedded.to(dtype)
