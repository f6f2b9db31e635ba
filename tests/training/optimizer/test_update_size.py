"""The norm of an update over the norm of the weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from andrea.training.parallel.ranks import Parallel
from andrea.training.step import SAMPLED_WEIGHTS, sampled_weights, update_ratios


def test_the_ratio_of_one_update_by_hand() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 0, 0], [0, 0, 1]]))
        before = sampled_weights(Parallel(model))
        model.weight += torch.tensor([[0.0, 1, 0], [0, 0, 2]])
    ratios = update_ratios(before, sampled_weights(Parallel(model)), lambda sums: sums)
    assert ratios.tolist() == pytest.approx([1.0])  # √5 / √5; the bias is not a matrix


def test_a_large_matrix_is_sampled() -> None:
    assert 0 < len(sampled_weights(Parallel(torch.nn.Linear(1000, 50)))[0]) <= SAMPLED_WEIGHTS


@pytest.mark.parametrize("borders", [(0, 301), (0, 100, 201, 301), (0, 1, 2, 299, 301)])
def test_the_samples_of_all_shards_are_those_of_the_whole_matrix(borders: tuple[int, ...]) -> None:
    """Evenly spaced over the whole matrix (301, 157), however its rows lie on the ranks."""
    whole = torch.arange(301 * 157.0).view(301, 157)

    class Shard(Parallel):
        """The rows from `start` to `stop`, as a rank has them under FSDP2."""

        def __init__(self, start: int, stop: int) -> None:
            self.local_parameters, self.shapes = {"w": nn.Parameter(whole[start:stop])}, {"w": whole.shape}
            self.local_rows = lambda name: slice(start, stop)

    shards = [Shard(start, stop) for start, stop in itertools.pairwise(borders)]
    samples = torch.cat([sampled_weights(shard)[0] for shard in shards])
    steps = samples.diff().unique()
    assert samples[0] == 0 and len(steps) == 1 and SAMPLED_WEIGHTS / 2 < len(samples) <= SAMPLED_WEIGHTS
