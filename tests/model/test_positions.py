"""Positions: rotary turns by hand and by their properties, learned rows, none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from andrea.config import group_config
from andrea.model.positions import LearnedPosition, RotaryPosition, make_position, scaled

NANO = group_config("model", "andrea-nano")
LENGTH, D = 31, 10


def rotary(base=100.0):
    return RotaryPosition(LENGTH, D, base)


def test_one_pair_turned_by_hand():
    turn = RotaryPosition(LENGTH, 2, 10000.0).placer(3, 0)  # one pair turns by one radian a position
    turned = turn(torch.tensor([[1.0, 0.0]] * 3))
    expected = torch.tensor([[math.cos(t), math.sin(t)] for t in range(3)])
    torch.testing.assert_close(turned, expected)


def test_pairs_as_complex_numbers():
    """Su et al.: entry p and p + D/2 are the real and imaginary part, multiplied by exp(i t base^(-2p/D))."""
    x = torch.randn(2, 3, 7, D)
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    angle = torch.arange(4, 11)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    expected = pairs * torch.polar(torch.ones_like(angle), angle)
    turned = rotary().placer(7, 4)(x)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


def test_a_turn_keeps_length_and_dot_products_feel_distance_alone():
    query, key = torch.randn(D), torch.randn(D)
    queries, keys = (rotary().placer(LENGTH, 0)(x.expand(LENGTH, D)) for x in (query, key))
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(LENGTH))
    products = queries @ keys.T
    for distance in (0, 1, 5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(products[0], products[0, :1].expand(LENGTH), atol=1e-2)


@pytest.mark.parametrize(("share", "n_rotated"), [(0.0, 0), (0.4, 4), (0.5, 4), (0.6, 6), (1.0, 10)])
def test_a_share_of_the_width_is_rotated_and_the_rest_keeps_its_numbers(share, n_rotated):
    """5 pairs; 0.5 of them is rounded to 2, an even number. The rotated pairs have the angles of a head of their width."""
    turn, x = RotaryPosition(LENGTH, D, 100.0, share).placer(7, 4), torch.randn(2, 3, 7, D)
    rotated = [p + half for half in (0, D // 2) for p in range(n_rotated // 2)]
    rest = [c for c in range(D) if c not in rotated]
    turned = turn(x)
    assert torch.equal(turned[..., rest], x[..., rest])
    if rotated:
        alone = RotaryPosition(LENGTH, n_rotated, 100.0).placer(7, 4)(x[..., rotated])
        torch.testing.assert_close(turned[..., rotated], alone, atol=0, rtol=0)


def test_low_precision_weights_do_not_round_the_angles():
    exact, low = rotary(), rotary().to(torch.bfloat16)
    x = torch.randn(5, D, dtype=torch.bfloat16)
    turned = low.placer(5, 20)(x)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, exact.placer(5, 20)(x))
    torch.testing.assert_close(turned, exact.placer(5, 20)(x.float()).bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("start", [0, 3])
def test_a_tensor_start_means_the_same(start):
    x = torch.randn(2, 5, D)
    learned = LearnedPosition(LENGTH, D)
    assert torch.equal(rotary().placer(5, start)(x), rotary().placer(5, torch.tensor(start))(x))
    assert torch.equal(learned.add(x, start), learned.add(x, torch.tensor(start)))


def test_learned_positions_are_added_once():
    learned, x = LearnedPosition(LENGTH, D), torch.randn(2, 5, D)
    torch.testing.assert_close(learned.add(x, 3) - x, learned.weight[3:8].expand(2, 5, D), atol=1e-6, rtol=1e-5)
    assert learned.placer(5, 3) is None


def test_by_config():
    x = torch.randn(2, 5, 64)
    positions = {kind: make_position(replace(NANO, position=kind)) for kind in ("rotary", "learned", "none")}
    assert positions["none"].add(x, 0) is x and positions["none"].placer(5, 0) is None
    assert positions["rotary"].add(x, 0) is x and positions["rotary"].placer(5, 0)(x).shape == x.shape
    assert positions["learned"].weight.shape == (NANO.sequence_length, NANO.d_model)
    assert not positions["rotary"].state_dict(), "the angles are computed, never saved"


@pytest.mark.parametrize("position", [rotary(), LearnedPosition(LENGTH, D)])
def test_a_position_past_the_end_is_an_error(position):
    with pytest.raises(AssertionError, match="position 31 is past sequence_length=31"):
        position.add(torch.zeros(1, 2, D), LENGTH - 1)
        position.placer(2, LENGTH - 1)


def test_scaled_frequencies_by_hand():
    """[factor 8, low 1, high 4, length 40]: pairs that turn 10, 2.5 and 0.5 times in 40 positions."""
    n_turn = torch.tensor([10.0, 2.5, 0.5], dtype=torch.float64)
    changed = scaled(n_turn * 2 * torch.pi / 40, 8.0, 1.0, 4.0, 40.0) * 40 / (2 * torch.pi)
    # unchanged; half way between 1 and 4, so half of it is divided; divided
    torch.testing.assert_close(changed, torch.tensor([10.0, 2.5 / 2 + 2.5 / 2 / 8, 0.5 / 8], dtype=torch.float64))


def test_scaled_positions_turn_slower_in_every_path():
    """The tables of a model: fast pairs as without scaling, the slowest an eighth as fast."""
    plain, slower = RotaryPosition(64, 16, 500.0), RotaryPosition(64, 16, 500.0, scaling=(8.0, 1.0, 4.0, 40.0))
    x = torch.randn(1, 1, 64, 16)
    one, other = plain.placer(64, 0)(x), slower.placer(64, 0)(x)
    torch.testing.assert_close(one[..., 0], other[..., 0])
    assert (one[..., 7] - other[..., 7]).abs().max() > 1e-3
    by_hand = 8 * torch.arange(8.0)  # the slowest pair at every eighth position, as without scaling at the position / 8
    turned = slower.placer(64, 0)(torch.ones(1, 1, 64, 16))[0, 0, by_hand.long(), 7]
    torch.testing.assert_close(turned, plain.placer(64, 0)(torch.ones(1, 1, 64, 16))[0, 0, :8, 7])
