"""A training step's micro-batches."""

from __future__ import annotations

import torch

from andrea.text.shards import IGNORED_TARGET
from andrea.training.step import Batch, micro_batches


def test_micro_batches_are_of_one_size_and_lose_nothing() -> None:
    tokens = torch.arange(21).view(7, 3)
    batch = Batch(tokens, tokens.clone(), n_target=21, dropout_seeds=torch.arange(7), most_rows=7)
    pieces = list(micro_batches(batch, 3))
    assert {len(part) for piece in pieces for part in piece} == {3}
    assert torch.cat([seeds for _, _, seeds in pieces]).tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1]
    kept = torch.cat([targets for _, targets, _ in pieces])
    assert torch.equal(kept[kept != IGNORED_TARGET], tokens.flatten())
