"""Masks on absolute positions: hand-written matrices, counts, combination."""

from __future__ import annotations

import torch

from andrea.attention import causal, key_padding
from andrea.attention.mask import visible_keys

CPU = torch.device("cpu")


def test_causal_written_out():
    expected = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    assert torch.equal(visible_keys(causal(), 3, 3, 0, CPU), expected)


def test_queries_after_cached_keys_stand_bottom_right():
    expected = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(visible_keys(causal(), 2, 5, 5 - 2, CPU), expected)
    assert torch.equal(visible_keys(causal(), 2, 5, torch.tensor(3), CPU), expected)


def test_more_queries_than_keys_leave_the_first_ones_blind():
    expected = torch.tensor([[0, 0], [1, 0], [1, 1]], dtype=torch.bool)
    assert torch.equal(visible_keys(causal(), 3, 2, 2 - 3, CPU), expected)


def test_half_of_the_scores_and_half_the_diagonal_are_visible():
    """Figure 5."""
    visible = visible_keys(causal(), 1024, 1024, 0, CPU)
    assert visible.numel() == 1_048_576
    assert visible.sum().item() == 524_800


def test_key_padding_has_the_leading_shape_of_its_lengths():
    visible = visible_keys(key_padding(torch.tensor([[2], [0]])), 3, 5, 0, CPU)  # lengths (B, 1)
    assert visible.expand(2, 1, 3, 5)[0, 0].tolist() == 3 * [[True, True, False, False, False]]
    assert not visible[1].any()


def test_both_must_agree():
    visible = visible_keys(causal() & key_padding(torch.tensor([2])), 3, 3, 0, CPU)
    assert visible[0].tolist() == [[True, False, False], [True, True, False], [True, True, False]]
