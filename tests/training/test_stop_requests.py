"""All ranks stop together, for the same reason and with the same exit code."""

from __future__ import annotations

import signal

import pytest
import torch

from andrea.training.stop_requests import StopRequests


def agreed(*received: int | None, max_minutes: float | None = None) -> list[StopRequests]:
    """The requests of ranks that received these signals, after they have agreed."""
    ranks = [StopRequests(max_minutes, torch.device("cpu"), print) for _ in received]
    for rank, number in zip(ranks, received, strict=True):
        rank.signal = number
    summed = torch.stack([torch.stack(rank.flags()) for rank in ranks]).sum(0)
    for rank in ranks:
        rank.agree(summed)
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
    assert [(rank.agreed, rank.exit_code) for rank in agreed(None, None, max_minutes=-1.0)] == [("stopped", 0)] * 2
    assert [rank.agreed for rank in agreed(None, None)] == [None, None]
