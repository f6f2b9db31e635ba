"""Heatmaps of heads as HTML."""

from __future__ import annotations

from andrea.training.records.weights_and_biases import heatmap


def test_a_heatmap_is_a_table_with_its_numbers() -> None:
    page = heatmap("attention/heads/<b>", [[1.0, 2.5], [None, 4.0]])
    assert all(text in page for text in ("attention/heads/&lt;b&gt;", ">1<", ">2.5<", ">–<", ">4<"))
    assert "hsl(215 70% 95%)" in page and "hsl(215 70% 30%)" in page  # the lowest and the highest
    assert heatmap("x", [[None]]).count("<td") == 1
