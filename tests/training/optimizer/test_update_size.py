"""The norm of an update over the norm of the weights."""

from __future__ import annotations

import pytest
import torch

from andrea.training.optimizer.update_size import SAMPLED_WEIGHTS, sampled_weights, update_ratios
from andrea.training.parallel.strategy import SingleProcess


def test_the_ratio_of_one_update_by_hand() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 0, 0], [0, 0, 1]]))
        before = sampled_weights(SingleProcess(model))
        model.weight += torch.tensor([[0.0, 1, 0], [0, 0, 2]])
    ratios = update_ratios(before, sampled_weights(SingleProcess(model)), lambda sums: sums)
    assert ratios.tolist() == pytest.approx([1.0])  # √5 / √5; the bias is not a matrix


def test_a_large_matrix_is_sampled() -> None:
    assert 0 < len(sampled_weights(SingleProcess(torch.nn.Linear(1000, 50)))[0]) <= SAMPLED_WEIGHTS
