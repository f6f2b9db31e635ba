"""Many processes, one run: torchrun starts them, they join here, rank 0 speaks for all, figures are added up.

A rank is one of the run's processes. Rank 0 chooses names, prints, logs, and writes what is written once. This module and
`parallel.py` are the training room's only ones that know torch.distributed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import UserError
from andrea.runtime.torchrun import ErrorOfRank0, RankLost
from andrea.training.parallel.watchdog import StoreWatchdog, Watchdog

Result = TypeVar("Result")
OWN_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
FROM_TORCHRUN = (*OWN_PLACE, "MASTER_ADDR", "MASTER_PORT")  # set by it, and by jobs of ours
TO_MEET, A_DAY = datetime.timedelta(minutes=10), datetime.timedelta(days=1)
LOST_CONTACT = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out|remote process exited", re.IGNORECASE
)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. Alone there is nobody to talk to: every method returns what it was given."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on its machine
    local_size: int = 1

    @property
    def joined(self) -> bool:
        """Whether torchrun started this process, be it alone."""
        return dist.is_available() and dist.is_initialized()

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    def from_rank_0(self, work: Callable[[], Result]) -> Result:
        """Rank 0 does the work and tells the others its result, or the UserError that it ended with."""
        if self.size == 1:
            return work()
        message: list[Any] = [None, None]
        if self.is_rank_0:
            try:
                message[0] = work()
            except UserError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message)
        if message[1] is not None:
            raise ErrorOfRank0(message[1])
        return message[0]

    def rank_0_first(self, work: Callable[[], Result]) -> Result:
        """Every rank does the work, the others once rank 0 has made what they will find."""
        if not self.is_rank_0:
            self.from_rank_0(lambda: None)
            return work()
        results: list[Result] = []
        self.from_rank_0(lambda: results.append(work()))
        return results[0]

    def added(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.size == 1:
            return numbers
        numbers = numbers.detach().clone()
        dist.all_reduce(numbers)
        return numbers

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        if self.size == 1:
            return numbers
        numbers = numbers.detach().clone()
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers

    def least(self, numbers: Tensor) -> Tensor:
        return -self.largest(-numbers)

    def heads(self, measured: HeadStatistics) -> HeadStatistics:
        """The heads' statistics over the sequences of all ranks."""
        if self.size == 1:
            return measured
        sums = HeadStatistics(*self.added(torch.stack(tuple(measured))).unbind())
        return sums._replace(largest_logit=self.largest(measured.largest_logit))

    def share(self, count: int) -> tuple[int, int, int]:
        """This rank's part of `count` rows: the first of them, how many (maybe none), and the most that any rank has."""
        each, left = divmod(count, self.size)
        return self.rank * each + min(self.rank, left), each + (self.rank < left), each + (left > 0)


@contextlib.contextmanager
def joined(watchdog_minutes: float) -> Iterator[tuple[Ranks, Watchdog]]:
    """The ranks of the run that torchrun has started, or this process alone; and who watches that none stands still.

    Raises RankLost where another rank is gone.
    """
    if not all(name in os.environ for name in FROM_TORCHRUN):
        yield Ranks(), Watchdog()
        return
    ranks = Ranks(*(int(os.environ[name]) for name in OWN_PLACE))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())
    with contact_watched():
        store, board = stores(ranks)
        # Waiting is limited by the watchdog, which says whom it waits for.
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=A_DAY)
    watchdog = StoreWatchdog(ranks.rank, ranks.size, board, watchdog_minutes)
    sys.excepthook = traceback_and_leave
    with contact_watched():
        yield ranks, watchdog
        dist.barrier()  # nobody leaves while another still writes or reads
    watchdog.finish()
    dist.destroy_process_group()  # not where something was raised: it would wait for work that others never do


def traceback_and_leave(*error: Any) -> None:
    """Python's own way out would wait for threads and cards that wait for other ranks."""
    sys.__excepthook__(*error)
    sys.stderr.flush()
    os._exit(1)


def stores(ranks: Ranks) -> tuple[dist.Store, dist.Store]:
    """Where the ranks of this start find each other, and where they tell each other that they are alive.

    torchrun keeps one store over all restarts, and what ranks of the start before have left there looks like news
    (pytorch issue 135712): the ranks then wait for the dead. So rank 0 opens a store of its own for each start and posts
    where it is; a post that leads to nobody is an old one.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        kept = dist.TCPStore(host, port, ranks.size, is_master=ranks.is_rank_0, timeout=TO_MEET)
        own_client = dist.TCPStore(
            host, port, is_master=False, timeout=TO_MEET
        )  # a store waits for one thing at a time
        return dist.PrefixStore("group", kept), dist.PrefixStore("board", own_client)
    kept = dist.TCPStore(host, port, is_master=False, timeout=TO_MEET)
    if ranks.is_rank_0:
        mine = own_address(host, port)
        server = dist.TCPStore(mine, 0, is_master=True, wait_for_workers=False, timeout=TO_MEET)
        start = secrets.token_hex(8)
        server.set(start, "here")
        kept.set("andrea/meeting", json.dumps([mine, server.port, start]))
        return dist.PrefixStore("group", server), dist.PrefixStore(start, kept)
    deadline = time.monotonic() + TO_MEET.total_seconds()
    while time.monotonic() < deadline:
        address, its_port, start = json.loads(kept.get("andrea/meeting"))
        try:
            socket.create_connection((address, its_port), timeout=5).close()  # torch would try a closed port for long
            server = dist.TCPStore(address, its_port, is_master=False, timeout=datetime.timedelta(seconds=20))
            if server.check([start]):
                server.set_timeout(TO_MEET)
                return dist.PrefixStore("group", server), dist.PrefixStore(start, kept)
        except (OSError, dist.DistError):
            time.sleep(0.2)
    raise RankLost(f"rank 0 has not opened a place to meet within {TO_MEET}")


def own_address(host: str, port: int) -> str:
    """The address under which this machine is seen by those that see `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as towards:  # sends nothing
        towards.connect(address)
        return towards.getsockname()[0]


@contextlib.contextmanager
def contact_watched() -> Iterator[None]:
    """Turns what torch raises when another rank is gone into RankLost."""
    try:
        yield
    except RuntimeError as error:
        is_distributed = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        if is_distributed or LOST_CONTACT.search(str(error)):
            words = re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0])  # without the line of torch's source
            raise RankLost(words.partition(". This is typically")[0]) from error
        raise
