"""Compatibility functions: hand-solved scores, the lowered form, and why the scale is what it is (spec, section 2)."""

from __future__ import annotations

import pytest
import torch

from andrea.attention import COMPATIBILITIES, DotProduct, ScaledDotProduct


def test_hand_solved_scores():
    query, key = torch.tensor([[1.0, 2.0, 0.0, 1.0]]), torch.tensor([[3.0, 4.0, 5.0, 1.0], [0.0, 0.0, 7.0, 0.0]])
    torch.testing.assert_close(DotProduct().scores(query, key), torch.tensor([[12.0, 0.0]]))
    torch.testing.assert_close(ScaledDotProduct().scores(query, key), torch.tensor([[6.0, 0.0]]))  # sqrt(4) = 2


@pytest.mark.parametrize("name", COMPATIBILITIES)
def test_lowered_form_is_a_plain_dot_product_with_the_same_scores(name):
    compatibility = COMPATIBILITIES[name]()
    query, key = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(2, 3, 11, 7, dtype=torch.float64)
    lowered_query, lowered_key = compatibility.lower(query, key)
    scores = compatibility.scores(query, key)
    assert scores.shape == (2, 3, 5, 11)
    torch.testing.assert_close(lowered_query @ lowered_key.mT, scores)
    for i, j in ((0, 0), (4, 10), (2, 7)):  # entry by entry, so that no axis is swapped
        one = compatibility.scores(query[1, 2, i : i + 1], key[1, 2, j : j + 1])
        torch.testing.assert_close(scores[1, 2, i, j], one[0, 0])


@pytest.mark.parametrize("d_k", [16, 64, 256, 4096])
def test_variance_of_random_scores(d_k):
    """Figure 6: q·k has variance d_k, the scaled score 1; sampling error of a variance is sqrt(2 / n) of it."""
    generator = torch.Generator().manual_seed(d_k)
    n = 2000
    query, key = torch.randn(n, 1, d_k, generator=generator), torch.randn(n, 1, d_k, generator=generator)
    tolerance = 5 * (2 / n) ** 0.5
    assert DotProduct().scores(query, key).var().item() == pytest.approx(d_k, rel=tolerance)
    assert ScaledDotProduct().scores(query, key).var().item() == pytest.approx(1, rel=tolerance)


def test_what_learns_nothing_has_no_parameters():
    assert all(not list(kind().parameters()) for kind in COMPATIBILITIES.values())
