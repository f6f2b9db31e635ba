"""An encoder-decoder made of nothing but MultiHeadAttention learns to reverse what it reads, through cross-attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from andrea.attention import MultiHeadAttention, ScaledDotProduct, causal

N_DIGIT, BEGIN, N_TOKEN, D_MODEL, N_HEAD, LENGTH = 10, 10, 11, 32, 4, 7


class Layer(nn.Module):
    """Self-attention, cross-attention where there is a memory, MLP: each added to what comes in."""

    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL) for _ in range(3))
        self.own = MultiHeadAttention(
            D_MODEL, N_HEAD, compatibility=ScaledDotProduct(), mask=causal() if is_decoder else None
        )
        self.cross = MultiHeadAttention(D_MODEL, N_HEAD, compatibility=ScaledDotProduct()) if is_decoder else None
        self.mlp = nn.Sequential(nn.Linear(D_MODEL, 4 * D_MODEL), nn.ReLU(), nn.Linear(4 * D_MODEL, D_MODEL))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.own(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[2](x))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(N_TOKEN, D_MODEL), nn.Embedding(LENGTH, D_MODEL)
        self.encoder, self.decoder = Layer(is_decoder=False), Layer(is_decoder=True)
        self.head = nn.Linear(D_MODEL, N_DIGIT)

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        """source (B, S), what is written so far (B, T), BEGIN first -> logits (B, T, N_DIGIT)."""
        memory = self.encoder(self.embed(source))
        return self.head(self.decoder(self.embed(written), memory))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position.weight[: tokens.shape[1]]


@pytest.mark.untraced
def test_it_learns_to_reverse_through_the_cross_attention():
    torch.manual_seed(0)
    model = EncoderDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    begin = torch.full((128, 1), BEGIN)
    for _ in range(500):
        source = torch.randint(N_DIGIT, (128, LENGTH))
        target = source.flip(1)
        loss = cross_entropy(model(source, torch.cat((begin, target[:, :-1]), 1)).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    source, written = torch.randint(N_DIGIT, (500, LENGTH)), torch.full((500, 1), BEGIN)
    with torch.no_grad():
        for _ in range(LENGTH):  # one digit at a time, from the digits it has written itself, never from the answer
            digit = model(source, written)[:, -1].argmax(-1, keepdim=True)
            written = torch.cat((written, digit), 1)
        errors = (written[:, 1:] != source.flip(1)).float().mean()
        assert errors < 0.01

        # The digits come through the cross-attention: with another source in the memory, so does another answer.
        other = torch.randint(N_DIGIT, (500, LENGTH))
        misled = model(other, written[:, :-1])[:, 0].argmax(-1)
        assert (misled == other[:, -1]).float().mean() > 0.99
