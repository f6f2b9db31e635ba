"""All ranks stop together, for the same reason and with the same exit code."""

from __future__ import annotations

import signal

import pytest
import torch

from andrea.training.planning.length import TimeBudget
from andrea.training.trainer import SIGNALS, StopRequests


def agreed(*received: int | None, budget: TimeBudget | None = None, wanted_steps: int = 0) -> list[StopRequests]:
    """The requests of ranks that received these signals, after they have agreed. wanted_steps: of rank 0."""
    ranks = [StopRequests(budget, torch.device("cpu"), print) for _ in received]
    for rank, number in zip(ranks, received, strict=True):
        rank.signal = number
    summed = sum(torch.stack(rank.flags(wanted_steps if rank is ranks[0] else 0)) for rank in ranks)
    for rank in ranks:
        rank.agree(summed.tolist())
    return ranks


@pytest.mark.parametrize(
    ("received", "exit_code"),
    [
        ((None, signal.SIGHUP, None), 129),
        ((signal.SIGINT, None), 130),
        ((None, signal.SIGTERM), 143),
        ((signal.SIGHUP, signal.SIGTERM), 143),
    ],
)
def test_every_rank_exits_with_the_code_of_a_signal_that_one_received(received: tuple, exit_code: int) -> None:
    ranks = agreed(*received)
    assert [(rank.agreed, rank.exit_code) for rank in ranks] == [("interrupted", exit_code)] * len(ranks)
    assert tuple(rank.signal for rank in ranks) == received  # a rank's own first Ctrl-C is not taken for its second


def test_the_time_limit_is_no_failure() -> None:
    over = TimeBudget(1.0, started=0.0, evaluation_steps=1.0, most_steps=9, clock=lambda: 61.0)
    assert [(rank.agreed, rank.exit_code) for rank in agreed(None, None, budget=over)] == [("stopped", 0)] * 2
    assert [rank.agreed for rank in agreed(None, None)] == [None, None]


def test_all_ranks_take_the_length_of_rank_0() -> None:
    for ranks in (agreed(None, None, None, wanted_steps=914), agreed(None, signal.SIGTERM, wanted_steps=914)):
        assert {rank.take_wanted_steps() for rank in ranks} == {914}
        assert {rank.take_wanted_steps() for rank in ranks} == {0}


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_a_ctrl_c_after_it_ends_the_process(first: signal.Signals) -> None:
    said: list[str] = []
    stopping = StopRequests(None, torch.device("cpu"), said.append)
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests may ignore it
    with stopping.signals_caught():
        for number in (first, signal.SIGTERM):  # a second SIGTERM changes nothing
            signal.raise_signal(number)
            assert stopping.signal == first
        assert [int(flag) for flag in stopping.flags(0)] == [*(number == first for number in SIGNALS), 0, 0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGHUP, before[-1])
    assert [signal.getsignal(number) for number in SIGNALS] == before and "interrupted" in said[0]
