"""Who stands still is named: watchdogs of several ranks on one real store, without the ranks."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from andrea.training.parallel.watchdog import StoreWatchdog


class Noting(StoreWatchdog):
    """Notes its last words, and stays."""

    def __init__(self, *given) -> None:
        self.words: list[str] = []
        super().__init__(*given)

    def leave(self, line: str) -> None:
        self.words.append(line)
        self.finish()


@pytest.fixture
def three():
    """The watchdogs of three ranks with a limit of 0.6 s."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = lambda: dist.TCPStore("127.0.0.1", server.port, timeout=datetime.timedelta(seconds=10))  # noqa: E731
    dogs = [Noting(rank, 3, dist.PrefixStore("board", client()), 0.01) for rank in range(3)]
    yield dogs
    for dog in dogs:
        dog.finish()


def said(dogs: list[Noting]) -> list[str]:
    deadline = time.monotonic() + 20
    while not any(dog.words for dog in dogs) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)  # the others would have had their say, too
    return [line for dog in dogs for line in dog.words]


def test_the_rank_that_came_least_far_is_the_one_all_wait_for(three) -> None:
    for dog in three:
        dog.at(7, "forward and backward")
    for dog in (three[0], three[2]):
        dog.at(7, "update")
    lines = said(three)
    assert lines and all("rank 1 is stuck, last seen in step 7: forward and backward" in line for line in lines)
    assert sum(line.startswith("error: ") for line in lines) == 1  # one speaks for all


def test_a_rank_that_fell_silent_is_named_even_before_training(three) -> None:
    time.sleep(0.3)
    three[2].finish()  # its thread ends, as where its process is stopped or its machine gone
    assert any("rank 2 does not answer, last seen in step 0: starting" in line for line in said(three[:2]))


def test_where_all_stand_still_nobody_is_accused(three) -> None:
    for dog in three:
        dog.at(3, "update")
    assert all("all ranks are stuck" in line for line in said(three))


def test_ranks_that_move_are_left_alone(three) -> None:
    for step in range(15):
        for dog in three:
            dog.at(step, "update")
        time.sleep(0.1)
    assert not any(dog.words for dog in three)
