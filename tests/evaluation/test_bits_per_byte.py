"""Bits per byte of documents: the windows, the mean and its standard error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import CONFIG, make_model, write_model

from andrea.evaluation.scoring import bits_per_byte, error_of_ratio, load_subject, rolling_windows


@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15, 30])
def test_each_token_is_predicted_once_from_the_tokens_before_it(count: int) -> None:
    ids = list(range(100, 100 + count))
    windows = list(rolling_windows(ids, 99, 7))
    assert [each for _, predicted in windows for each in predicted] == ids
    for context, predicted in windows:
        assert [*context, *predicted] == list(range(context[0], predicted[-1] + 1))
        assert len(context) >= 1 and len(context) + len(predicted) <= 8
    assert all(len(context) + len(predicted) == 8 for context, predicted in windows[1:])


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 14, 15, 30])
def test_the_windows_are_those_of_lm_eval(count: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    ids = list(range(count))
    theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, 99, 7, 1))
    assert list(rolling_windows(ids, 99, 7)) == list(theirs)


def test_a_model_that_knows_nothing_needs_eight_bits_a_byte(tmp_path: Path) -> None:
    """All logits 0: each of the 257 tokens has the same probability."""
    tensors = {name: torch.zeros_like(each) for name, each in make_model().state_dict().items()}
    write_model(tmp_path, tensors)
    subject = load_subject("one", str(tmp_path), "cpu", 3, False)
    texts = ["a" * 50, "é" * (CONFIG.sequence_length // 2), "z"]
    found = bits_per_byte(subject, texts)
    assert found.value == pytest.approx(math.log2(257), rel=1e-6)
    assert (found.n_document, found.n_byte) == (3, sum(len(text.encode()) for text in texts))
    assert found.standard_error == pytest.approx(0, abs=1e-6)


def test_the_standard_error_of_a_ratio() -> None:
    """Two windows of 2 bytes with 2 and 6 bits: 2 bits per byte; the residuals are -2 and 2."""
    assert error_of_ratio([2, 6], [2, 2], 2.0) == pytest.approx(math.sqrt(8 * 2 / 1) / 4)
    assert error_of_ratio([2], [2], 1.0) is None
