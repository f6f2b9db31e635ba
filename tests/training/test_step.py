"""A training step: micro-batches, and two updates in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from andrea.config import UserError
from andrea.text.loader import IGNORED_TARGET
from andrea.training.records.run_folder import read_lines
from andrea.training.step import Batch, micro_batches


def test_micro_batches_are_of_one_size_and_lose_nothing() -> None:
    tokens = torch.arange(21).view(7, 3)
    batch = Batch(tokens, tokens.clone(), n_target=21, dropout_seeds=torch.arange(7), most_rows=7)
    pieces = list(micro_batches(batch, 3))
    assert {len(part) for piece in pieces for part in piece} == {3}
    assert torch.cat([seeds for _, _, seeds in pieces]).tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1]
    kept = torch.cat([targets for _, targets, _ in pieces])
    assert torch.equal(kept[kept != IGNORED_TARGET], tokens.flatten())


def test_two_updates_from_half_a_step_are_those_of_two_steps_of_half_the_size(tiny_run, tmp_path: Path) -> None:
    """At constant rates, as data, rates and weight decay have it. A step's loss is the mean of its two updates'."""
    rates = {"learning_rate": 0.01, "embedding_learning_rate": 0.05, "matrix_learning_rate": 0.02}
    constant = ["optimizer.warmup_steps=0", "optimizer.decay_fraction=0.001", "train.log_every=1", "precision=fp32"]
    quick = ["train.steps=4", "train.eval_every=4", "train.half_batch_steps=4"]
    small = ["train.steps=8", "train.eval_every=8", "train.tokens_per_step=128"]
    small += [f"optimizer.{name}={rate * 0.5**0.5!r}" for name, rate in rates.items()]
    shared = ["optimizer.convolution_learning_rate=null", "train.save_every=8", "train.micro_batch=4"]
    tiny_run("name=halves", *constant, *shared, *quick)
    tiny_run("name=small", *constant, *shared, *small)
    ours, theirs = (read_lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("halves", "small"))
    losses = [[row["train/loss"] for row in rows if "train/loss" in row] for rows in (ours, theirs)]
    assert losses[0] == pytest.approx(
        [(one + two) / 2 for one, two in zip(*[iter(losses[1])] * 2, strict=True)], rel=1e-6
    )
    assert ours[-1]["val/loss"] == pytest.approx(theirs[-1]["val/loss"], rel=1e-6)
    assert ours[-1]["tokens"] == theirs[-1]["tokens"]


def test_half_a_batch_needs_an_even_number_of_sequences(tiny_run) -> None:
    with pytest.raises(UserError, match="holds 3 of model.sequence_length=32; try train.tokens_per_step=128"):
        tiny_run("train.half_batch_steps=3", "train.tokens_per_step=96")
