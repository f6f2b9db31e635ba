"""Masks on absolute positions: hand-written matrices, counts, combination."""

from __future__ import annotations

import pytest
import torch
from oracle import MASKS, Case

from andrea.attention import causal, documents_of, key_padding, packed_documents, sliding_window
from andrea.attention.mask import visible_interval, visible_keys

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
    """T (T + 1) / 2 of T² scores, for T = 1024."""
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


def test_a_window_holds_the_querys_own_position():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(visible_keys(sliding_window(2), 4, 4, 0, CPU), expected)
    assert torch.equal(visible_keys(causal() & sliding_window(2), 4, 4, 0, CPU), expected)
    assert torch.equal(visible_keys(sliding_window(1), 4, 4, 0, CPU), torch.eye(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"sliding_window\(0\): the window includes the query's own position"):
        sliding_window(0)


def test_documents_see_themselves_alone():
    documents = torch.tensor([[4, 4, 9, 9, 9], [0, 1, 1, 0, 0]])  # a number that comes back is a new document
    visible = visible_keys(packed_documents(documents), 5, 5, 0, CPU)
    first = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
    second = torch.block_diag(torch.ones(1, 1), torch.ones(2, 2), torch.ones(2, 2)).bool()
    assert torch.equal(visible, torch.stack((first, second)))
    both = visible_keys(causal() & packed_documents(documents), 2, 5, 3, CPU)
    assert both.tolist() == [[[False, False, True, True, False], [False, False, True, True, True]],
                             [[False, False, False, True, False], [False, False, False, True, True]]]  # fmt: skip


def test_queries_outside_the_known_positions_belong_to_no_document():
    visible = visible_keys(packed_documents(torch.tensor([0, 0, 1])), 5, 3, -1, CPU)
    assert visible.int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_documents_of_another_length_than_the_keys_are_refused():
    with pytest.raises(ValueError, match="packed_documents was made for 3 positions, but there are 4 keys"):
        visible_keys(packed_documents(torch.tensor([0, 0, 1])), 4, 4, 0, CPU)


def test_an_end_of_text_stands_before_its_document():
    tokens = torch.tensor([[5, 6, 0, 7, 0, 0, 8]])
    assert documents_of(tokens, 0).tolist() == [[0, 0, 1, 1, 2, 3, 3]]


@pytest.mark.parametrize("start", [0, 4, -3, torch.tensor(4)])
@pytest.mark.parametrize("mask", MASKS)
def test_the_interval_is_the_predicate(mask, start):
    """What the fast path skips by, against what the readable path looks up; and its ends never move backwards."""
    made = Case(3, 1, 1, 11, 17, 8, 8, mask).made_mask()
    first, stop = visible_interval(made, 11, 17, start, CPU)
    key = torch.arange(17)
    by_interval = (first[..., None] <= key) & (key < stop[..., None])
    if made is None:
        assert by_interval.all()
        return
    assert made.is_interval
    visible = visible_keys(made, 11, 17, start, CPU)
    assert torch.equal(*torch.broadcast_tensors(by_interval, visible))
    assert (first.diff(dim=-1) >= 0).all() and (stop.diff(dim=-1) >= 0).all()
