"""A stuck rank is named: the watchdogs of three ranks on one real store, in one process."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from andrea.training.parallel.ranks import Watchdog


class RecordingWatchdog(Watchdog):
    """Records its message instead of ending the process."""

    def __init__(self, *given) -> None:
        self.messages: list[str] = []
        super().__init__(*given)

    def leave(self, message: str) -> None:
        self.messages.append(message)
        self.finish()


@pytest.fixture
def three():
    """The watchdogs of three ranks with a limit of 0.6 s."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", server.port, timeout=datetime.timedelta(seconds=10))

    dogs = [RecordingWatchdog(rank, 3, dist.PrefixStore("status", client()), 0.01) for rank in range(3)]
    yield dogs
    for dog in dogs:
        dog.finish()
    for dog in dogs:
        dog.thread.join()  # before the store is gone


def messages_of(dogs: list[RecordingWatchdog]) -> list[str]:
    deadline = time.monotonic() + 20
    while not any(dog.messages for dog in dogs) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)  # time for the others to end as well
    return [line for dog in dogs for line in dog.messages]


def test_the_rank_with_the_least_progress_is_named(three) -> None:
    for dog in three:
        dog.at(7, "forward and backward")
    for dog in (three[0], three[2]):
        dog.at(7, "update")
    lines = messages_of(three)
    assert lines and all("rank 1 is stuck, last seen in step 7: forward and backward" in line for line in lines)
    assert sum(line.startswith("error: ") for line in lines) == 1  # only one rank prints


def test_a_rank_that_rests_has_made_a_move(three) -> None:
    """Ranks 0 and 2 wait without a limit for rank 1, which is stuck in what it did before."""
    for dog in three:
        dog.at(7, "update")
    for dog in (three[0], three[2]):
        dog.rest(7, "sampling")
    assert any("rank 1 is stuck, last seen in step 7: update" in line for line in messages_of(three))


def test_ranks_that_all_rest_are_not_limited(three) -> None:
    for dog in three:
        dog.rest(7, "sampling")
    time.sleep(1.5)
    assert not any(dog.messages for dog in three)


def test_the_first_status_is_written_before_any_wait(three) -> None:
    """A rank that dies at once has been seen then."""
    dog = three[0]
    dog.finish()
    dog.thread.join()
    dog.status_store.delete_key("rank 0")
    dog.watch()
    assert dog.status_store.check(["rank 0"])


def test_a_store_that_is_gone_ends_the_rank_after_the_limit() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = RecordingWatchdog(0, 1, dist.TCPStore("127.0.0.1", server.port), 0.01)
    while not server.check(["rank 0"]):
        time.sleep(0.01)
    del server
    dog.thread.join(20)
    assert len(dog.messages) == 1 and "error: step 0: torchrun's store does not answer" in dog.messages[0]


@pytest.mark.parametrize(("minutes", "timeout_s"), [(0.01, 10), (10, 150)])
def test_a_call_of_the_store_ends_well_within_the_limit(minutes: float, timeout_s: float) -> None:
    """A quarter of the limit, but at least ten seconds."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = RecordingWatchdog(0, 1, server, minutes)
    dog.finish()
    dog.thread.join()
    assert server.timeout.total_seconds() == timeout_s


def test_a_rank_that_no_longer_answers_is_named_even_before_training(three) -> None:
    time.sleep(0.3)
    three[2].finish()  # its thread ends, as when its process or machine is gone
    assert any("rank 2 does not answer, last seen in step 0: starting" in line for line in messages_of(three[:2]))


def test_where_all_ranks_are_stuck_none_is_named(three) -> None:
    for dog in three:
        dog.at(3, "update")
    lines = messages_of(three)
    assert lines and all("all ranks are stuck" in line for line in lines)


def test_a_step_within_the_limit_is_not_stuck() -> None:
    """The limit is 2 s; a diagnosis takes 0.75 s."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = RecordingWatchdog(0, 1, server, 2 / 60)
    dog.at(1, "update")
    time.sleep(1.25)
    dog.finish()
    dog.thread.join()
    assert dog.messages == []


def test_ranks_that_make_progress_run_on(three) -> None:
    for step in range(15):
        for dog in three:
            dog.at(step, "update")
        time.sleep(0.1)
    assert not any(dog.messages for dog in three)
