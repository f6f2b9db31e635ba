"""What is measured of a head: by hand, across implementations, and summed up."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import MASKS, Case
from test_attend import Checkered

from andrea.attention import (
    DotProduct,
    HeadStatistics,
    MultiHeadAttention,
    ScaledDotProduct,
    attend,
    attention_weights,
    causal,
    sliding_window,
)
from andrea.attention.statistics import head_statistics, masses_of_weights, sees


def test_two_keys_by_hand():
    """Scores 0 and ln 3: weights 1/4 and 3/4."""
    query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    _, rows = attend(query, key, key, implementation="reference", statistics=True)
    assert rows.log_sum_exp.item() == pytest.approx(math.log(4))
    assert rows.largest_logit.item() == pytest.approx(math.log(3))
    assert rows.entropy_nats.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert rows.first_token_mass.item() == pytest.approx(0.25)
    assert rows.previous_token_mass.item() == pytest.approx(0.25)  # the query stands at position 1
    assert rows.visible_keys.item() == 2


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("mask", MASKS)
def test_masses_are_weights_of_the_weight_matrix(mask, implementation):
    case = Case(2, 4, 2, 7, 7, 16, 16, mask)
    query, key, value, _ = case.inputs(torch.float32)
    how = {"mask": case.made_mask(), "implementation": implementation}
    _, rows = attend(query, key, value, statistics=True, **how)
    identity = torch.eye(7).expand(2, 2, 7, 7)
    weights = attend(query, key, identity, **how)
    torch.testing.assert_close(rows.first_token_mass, weights[..., 0], atol=2e-6, rtol=0)
    previous = torch.cat((torch.zeros(2, 4, 1), weights.diagonal(-1, -2, -1)), -1)
    torch.testing.assert_close(rows.previous_token_mass, previous, atol=2e-6, rtol=0)
    visible = (weights > 0).sum(-1)
    assert torch.equal(rows.visible_keys.expand_as(visible), visible)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("mask", [causal(), sliding_window(2)])
def test_sequences_at_positions_of_their_own_are_measured_as_each_alone(mask, implementation):
    query, key, value = torch.randn(2, 4, 3, 16), *torch.randn(2, 2, 2, 11, 16)
    start = torch.tensor([5, 0])[:, None, None]
    _, rows = attend(query, key, value, mask=mask, start=start, implementation=implementation, statistics=True)
    heads = head_statistics(rows, mask, start, 11)
    for index, own in enumerate((5, 0)):
        of_one = [each[index : index + 1] for each in (query, key, value)]
        _, alone = attend(*of_one, mask=mask, start=own, implementation=implementation, statistics=True)
        torch.testing.assert_close(rows.previous_token_mass[index], alone.previous_token_mass[0])
        for part, expected in zip(heads, head_statistics(alone, mask, own, 11), strict=True):
            assert part is expected is None or torch.allclose(part[index], expected[0], atol=1e-6)


def test_the_previous_token_of_a_query_that_stands_after_the_keys():
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    assert masses_of_weights(weights, 1)[1].tolist() == pytest.approx([0.1, 0.3])
    assert masses_of_weights(weights, -1)[1].tolist() == pytest.approx([0.0, 0.0])
    assert masses_of_weights(weights, 4)[1].tolist() == pytest.approx([0.0, 0.0])  # key 3 and 4 are not there


@pytest.mark.parametrize("mask", [None, causal(), sliding_window(3), Checkered()])
def test_sees_asks_the_mask(mask):
    position, of_key = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([0, 0, 0, 2, 5])
    assert torch.equal(
        sees(mask, of_key.expand(2, 1, 5), position.expand(2, 1, 5), 7)[1, 0], sees(mask, of_key, position, 7)
    )
    expected = [mask is None or bool(mask.visible(i, j)) for i, j in zip(position, of_key, strict=True)]
    assert sees(mask, of_key, position, 7).tolist() == expected
    assert not sees(mask, of_key - 7, position, 7).any()


def measured(seed, n_batch=2):
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, n_batch, 3, 11, 16)
    how = {"sink": torch.tensor([-1.0, 0.0, 1.0])}
    _, rows = attend(query, key, value, mask=causal(), implementation="reference", statistics=True, **how)
    return head_statistics(rows, causal(), 0, 11, gate=2 * torch.rand(n_batch, 3, 11, 5)), rows


def test_heads_are_means_over_the_rows_that_count():
    heads, rows = measured(1)
    figures = {name: value[0] for name, value in HeadStatistics.of_layers([heads]).figures().items()}
    torch.testing.assert_close(figures["entropy_nats"], rows.entropy_nats.mean((0, 2)))
    most = torch.arange(1, 12).log().mean()
    torch.testing.assert_close(figures["entropy_share"], rows.entropy_nats.mean((0, 2)) / most)
    torch.testing.assert_close(figures["largest_logit"], rows.largest_logit.amax((0, 2)))
    # The first query is left out: it sees key 0 alone, and has no key before it.
    torch.testing.assert_close(figures["first_token_mass"], rows.first_token_mass[..., 1:].mean((0, 2)))
    torch.testing.assert_close(figures["previous_token_mass"], rows.previous_token_mass[..., 1:].mean((0, 2)))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_sink_s_share_is_logged_and_the_entropy_is_that_of_the_keys(implementation):
    query, key, value = torch.randn(3, 2, 3, 11, 16)
    sink = torch.tensor([-1.0, 0.0, 2.0])
    how = {"mask": causal(), "implementation": implementation, "statistics": True}
    without, plain = (attend(query, key, value, **how, **given)[1] for given in ({}, {"sink": None}))
    _, rows = attend(query, key, value, **how, sink=sink)
    torch.testing.assert_close(rows.entropy_nats, without.entropy_nats)
    assert torch.equal(rows.largest_logit, without.largest_logit) and plain.sink_mass is None
    weights = attention_weights(query, key, mask=causal(), sink=sink)
    torch.testing.assert_close(rows.sink_mass, 1 - weights.sum(-1), atol=2e-6, rtol=0)
    torch.testing.assert_close(rows.first_token_mass, weights[..., 0], atol=2e-6, rtol=0)
    figures = HeadStatistics.of_layers([head_statistics(rows, causal(), 0, 11)]).figures()
    torch.testing.assert_close(figures["sink_mass"][0], rows.sink_mass.mean((0, 2)))
    assert "sink_mass" not in HeadStatistics.of_layers([head_statistics(without, causal(), 0, 11)]).figures()


def test_parts_add_up():
    (one, two) = (HeadStatistics.of_layers([measured(seed, n)[0]]) for seed, n in ((1, 2), (2, 5)))
    together = one.merged(two)
    assert torch.equal(together.rows, torch.full((1, 3), 77.0))
    assert torch.equal(together.largest_logit, torch.maximum(one.largest_logit, two.largest_logit))
    torch.testing.assert_close(together.figures()["entropy_nats"], (one.entropy + two.entropy) / 77)


@pytest.mark.parametrize("n_token", [11, 23])  # fewer and more than a head's width, 16
@pytest.mark.parametrize("implementation", ["auto", "sdpa", "reference", "triton"])
def test_multi_head_attention_shows_its_heads_and_returns_the_same(implementation, n_token):
    torch.manual_seed(0)
    attention = MultiHeadAttention(
        48,
        3,
        compatibility=ScaledDotProduct(),
        mask=causal(),
        n_kv_head=1,
        gate="scalar",
        sink=implementation != "sdpa",  # which cannot compute one
        implementation=implementation,
    )
    x = torch.randn(2, n_token, 48)
    output, heads = attention(x, statistics=True)
    torch.testing.assert_close(output, attention(x))
    assert isinstance(heads, HeadStatistics)
    query, key, _, _ = attention.project(x)
    rows = attend(query, key, key, mask=causal(), implementation="reference", statistics=True,
                  compatibility=DotProduct(), sink=attention.sink)[1]  # fmt: skip
    torch.testing.assert_close(
        heads, head_statistics(rows, causal(), 0, n_token, attention.gates(x)), atol=1e-4, rtol=1e-5
    )
    assert not any(part.requires_grad for part in heads if part is not None)


def test_sequences_that_do_not_count_are_left_out():
    """A micro-batch may be filled up with copies of a sequence: sums and the largest logit are of the real ones alone."""
    heads, _ = measured(1, n_batch=4)
    some = HeadStatistics.of_layers([heads, heads], torch.tensor([True, False, True, False]))
    by_hand = HeadStatistics(*(part[[0, 2]].sum(0) for part in heads))._replace(
        largest_logit=heads.largest_logit[[0, 2]].amax(0)
    )
    assert some.rows.shape == (2, 3)
    for part, expected in zip(some, by_hand, strict=True):
        torch.testing.assert_close(part, expected.expand(2, 3))
