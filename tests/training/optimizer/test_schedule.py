"""The learning rate at points where it is known."""

from __future__ import annotations

import dataclasses

import pytest

from andrea.cli.command_line import configure
from andrea.config import OptimizerConfig, RunConfig
from andrea.training.optimizer.schedule import rate_at

BASE = configure(RunConfig, "train", []).optimizer


def schedule(**changes: object) -> OptimizerConfig:
    return dataclasses.replace(BASE, **changes)


def test_warm_up_is_linear_from_the_first_step() -> None:
    config = schedule(warmup_steps=4, schedule="constant_then_decay", decay_fraction=0.0, final_fraction=1.0)
    assert [rate_at(step, 100, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_constant_then_decay_falls_linearly_over_the_last_fraction() -> None:
    config = schedule(warmup_steps=0, schedule="constant_then_decay", decay_fraction=0.4, final_fraction=0.0)
    rates = [rate_at(step, 10, config) for step in range(10)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_cosine_starts_at_the_peak_halves_in_the_middle_and_ends_at_the_final_fraction() -> None:
    config = schedule(warmup_steps=0, schedule="cosine", final_fraction=0.1)
    assert [rate_at(step, 11, config) for step in (0, 5, 10)] == pytest.approx([1.0, 0.55, 0.1])


def test_a_run_shorter_than_its_warm_up_still_reaches_the_peak() -> None:
    config = schedule(warmup_steps=100, schedule="constant_then_decay", decay_fraction=0.0, final_fraction=1.0)
    assert rate_at(2, 3, config) == 1.0
