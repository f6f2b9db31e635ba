"""The learning rate at points where it is known."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from andrea.api.command_line import configure
from andrea.config import OptimizerConfig, RunConfig
from andrea.training.optimizer import decay_start, may_change, rate_at, relength

BASE = configure(RunConfig, "train", []).optimizer


def schedule(**changes: object) -> OptimizerConfig:
    return dataclasses.replace(BASE, **changes)


def test_warm_up_is_linear_from_the_first_step() -> None:
    config = schedule(warmup_steps=4, schedule="constant_then_decay", decay_fraction=0.0)
    assert [rate_at(step, 100, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_constant_then_decay_falls_linearly_over_the_last_fraction() -> None:
    config = schedule(warmup_steps=0, schedule="constant_then_decay", decay_fraction=0.4)
    rates = [rate_at(step, 10, config) for step in range(10)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_cosine_starts_at_the_peak_halves_in_the_middle_and_ends_at_a_tenth() -> None:
    config = schedule(warmup_steps=0, schedule="cosine", kind="adamw")
    assert [rate_at(step, 11, config) for step in (0, 5, 10)] == pytest.approx([1.0, 0.55, 0.1])


def test_a_run_shorter_than_its_warm_up_still_reaches_the_peak() -> None:
    config = schedule(warmup_steps=100, schedule="constant_then_decay", decay_fraction=0.0)
    assert rate_at(2, 3, config) == 1.0


# ------------------------------------------------------------------------------------------ a length that still changes

schedules = st.builds(
    schedule,
    schedule=st.sampled_from(["constant_then_decay", "cosine"]),
    decay_fraction=st.floats(0, 1),
    kind=st.sampled_from(["muon", "adamw"]),
    warmup_steps=st.integers(0, 30),
)
lengths = st.integers(1, 400)


@given(schedules, lengths, lengths)
def test_until_the_decay_begins_the_rate_is_that_of_every_longer_run(
    config: OptimizerConfig, steps: int, more: int
) -> None:
    longer = steps + more
    start = decay_start(steps, config)
    assert 0 <= start <= decay_start(longer, config)
    assume(steps >= config.warmup_steps)  # a shorter run has a shorter warm-up
    rates, rates_of_longer = (
        [rate_at(step, length, config) for step in range(min(start + 1, steps))] for length in (steps, longer)
    )
    assert rates == rates_of_longer


@given(schedules, lengths, st.integers(0, 400), lengths)
def test_a_change_of_length_leaves_the_past_as_it_was(
    config: OptimizerConfig, steps: int, done: int, wanted: int
) -> None:
    """All that has been done is what a run of the new length does; the length stays once the decay has begun."""
    done = min(done, steps)
    new = relength(done, steps, wanted, config)
    if not may_change(done, steps, config):
        assert new == steps
        return
    assert new >= max(wanted, done + 1) and decay_start(new, config) >= done
    assert [rate_at(step, new, config) for step in range(done)] == [
        rate_at(step, steps, config) for step in range(done)
    ]
    assert new == wanted or new == done + 1 or decay_start(new - 1, config) < done  # no longer than it has to be


@given(schedules, lengths, st.data())
def test_a_run_that_is_asked_to_end_begins_to_decay_at_once(
    config: OptimizerConfig, steps: int, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, steps - 1))
    assume(may_change(done, steps, config))
    new = relength(done, steps, 1, config)
    assert new <= steps
    assert not may_change(done + 1, new, config) or config.decay_fraction == 0 or done + 1 <= config.warmup_steps


def test_the_length_is_free_in_the_constant_phase_and_fixed_afterwards() -> None:
    config = schedule(warmup_steps=10, schedule="constant_then_decay", decay_fraction=0.6)
    assert [may_change(step, 100, config) for step in (0, 9, 40, 41, 100)] == [True, True, True, False, False]
    assert [relength(30, 100, wanted, config) for wanted in (1, 74, 75, 76, 200)] == [74, 74, 75, 76, 200]
    assert relength(41, 100, 200, config) == 100
    cosine = schedule(warmup_steps=10, schedule="cosine")
    assert [may_change(step, 100, cosine) for step in (0, 10, 11)] == [True, True, False]
    assert [relength(step, 100, 1, cosine) for step in (0, 9, 10)] == [1, 10, 11]  # the next step belongs to the run
