"""Hashed bigrams: an embedding of each pair of neighbouring tokens is added to the embedding of the token.

B sequences, T tokens, R rows of the table.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

NO_TOKEN = -1  # before the first token of a text


def tokens_before(tokens: Tensor, starts_text: Tensor | None = None) -> Tensor:
    """The token before each one, (B, T); NO_TOKEN before a sequence's first, and where `starts_text` (B, T) is true."""
    before = pad(tokens[:, :-1], (1, 0), value=NO_TOKEN)
    return before if starts_text is None else before.masked_fill(starts_text, NO_TOKEN)


def row_and_sign(before: Tensor, tokens: Tensor, n_row: int) -> tuple[Tensor, Tensor]:
    """The row of each pair of tokens, in 0..n_row - 1, and its sign, 1 or -1: one hash of the pair, (B, T) int64 each.

    31 bits are mixed by multiplications and shifts (as in the finaliser of MurmurHash3), so that no product overflows.
    """
    mixed = (before * 0x4F1BBCDD + tokens * 0x2545F491) & 0x7FFFFFFF
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0x7FFFFFFF
    mixed = mixed ^ (mixed >> 15)
    return (mixed >> 1) % n_row, (mixed & 1) * 2 - 1


class BigramEmbedding(nn.Module):
    """± E[hash(token before, token)], (B, T, d_model): zero at first, and for a token with none before it.

    Many pairs share a row. The sign, a second hash (feature hashing: Weinberger et al. 2009, arXiv 0902.2206, section 2),
    makes what they add to each other's row cancel in the mean. From modded-nanogpt; measured here in bench/README.md.
    """

    def __init__(self, n_row: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(n_row, d_model)
        nn.init.zeros_(self.table.weight)

    def forward(self, before: Tensor, tokens: Tensor) -> Tensor:
        """before, tokens (B, T) int64; before: NO_TOKEN where there is none."""
        rows, signs = row_and_sign(before, tokens, self.table.num_embeddings)
        signs = signs.masked_fill(before == NO_TOKEN, 0)
        return signs[..., None].to(self.table.weight.dtype) * self.table(rows)
