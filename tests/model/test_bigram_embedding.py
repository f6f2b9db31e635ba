"""Hashed bigrams: rows, signs, and what a model adds to its input."""

from __future__ import annotations

import torch

from andrea.config import AttentionConfig, ModelConfig
from andrea.model import GPT, initialise
from andrea.model.gpt import NO_TOKEN, BigramEmbedding, row_and_sign, tokens_before

CONFIG = ModelConfig(
    name="tiny", d_model=16, n_layer=1, n_head=2, d_mlp=24, sequence_length=8, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=True, qk_norm=True, logit_softcap=None,
    recipe_steps=1, recipe_tokens_per_step=8, bigram_rows=29,
)  # fmt: skip


def all_pairs(n_vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    before, tokens = torch.meshgrid(torch.arange(n_vocab), torch.arange(n_vocab), indexing="ij")
    return before.flatten(), tokens.flatten()


def test_pairs_are_spread_over_rows_and_signs_as_by_chance() -> None:
    rows, signs = row_and_sign(*all_pairs(500), n_row=1000)
    counts = torch.bincount(rows, minlength=1000).double()
    assert len(counts) == 1000
    # 250 in a row on average; a Poisson variance of 250 gives chi squared / 1000 = 1, of deviation 0.045
    assert abs(((counts - 250) ** 2 / 250).mean() - 1) < 0.2
    assert set(signs.tolist()) == {1, -1}
    assert abs(signs.double().mean()) < 0.01  # deviation 0.002
    sums = torch.zeros(1000, dtype=torch.float64).index_add_(0, rows, signs.double())
    assert abs((sums**2 / 250).mean() - 1) < 0.2  # the sign does not depend on the row
    swapped, _ = row_and_sign(*reversed(all_pairs(500)), n_row=1000)
    assert (swapped == rows).double().mean() < 0.01  # the order of the two counts


def test_the_largest_tokens_do_not_overflow() -> None:
    largest = torch.tensor([2**31 - 1])
    exact = (largest.item() * 0x4F1BBCDD + largest.item() * 0x2545F491) & 0x7FFFFFFF
    for factor in (0x2C1B3C6D, 0x297A2D39):
        exact = ((exact ^ (exact >> 15)) * factor) & 0x7FFFFFFF
    exact ^= exact >> 15
    row, sign = row_and_sign(largest, largest, n_row=2**24)
    assert (row.item(), sign.item()) == ((exact >> 1) % 2**24, (exact & 1) * 2 - 1)


def test_the_tokens_before() -> None:
    tokens = torch.tensor([[5, 0, 7, 8], [1, 2, 0, 0]])
    assert tokens_before(tokens).tolist() == [[NO_TOKEN, 5, 0, 7], [NO_TOKEN, 1, 2, 0]]
    assert tokens_before(tokens, tokens == 0).tolist() == [
        [NO_TOKEN, NO_TOKEN, 0, 7],
        [NO_TOKEN, 1, NO_TOKEN, NO_TOKEN],
    ]


def test_it_adds_a_signed_row_for_each_pair() -> None:
    embedding = BigramEmbedding(29, 16)
    tokens = torch.tensor([[3, 4, 4, 2]])
    before = tokens_before(tokens)
    assert embedding(before, tokens).count_nonzero() == 0  # zero at first
    torch.nn.init.normal_(embedding.table.weight, generator=torch.Generator().manual_seed(1))
    added = embedding(before, tokens)
    assert added[0, 0].count_nonzero() == 0
    rows, signs = row_and_sign(before, tokens, 29)
    for place in (1, 2, 3):
        torch.testing.assert_close(added[0, place], signs[0, place] * embedding.table.weight[rows[0, place]])


def test_a_model_adds_it_and_documents_do_not_mix() -> None:
    tokens = torch.tensor([[0, 3, 4, 0, 5, 6], [0, 2, 1, 0, 5, 6]])
    for across in (True, False):
        model = GPT(CONFIG, AttentionConfig("scaled_dot", "auto", across_documents=across), n_vocab=11, end_of_text=0)
        initialise(model, torch.Generator().manual_seed(1))
        torch.testing.assert_close(model.embed(tokens), model.embedding(tokens))
        torch.nn.init.normal_(model.bigram_embedding.table.weight, generator=torch.Generator().manual_seed(2))
        second_documents = model.embed(tokens)[:, 3:]
        assert torch.equal(second_documents[0], second_documents[1]) == (not across)
        assert not torch.equal(model.embed(tokens)[:, 1:3], model.embedding(tokens)[:, 1:3])
