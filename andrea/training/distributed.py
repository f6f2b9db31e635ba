"""Many processes, one run: torchrun starts them, they join here, rank 0 speaks for all, figures are added up.

A rank is one of the run's processes. Rank 0 chooses names, prints, logs, and writes what is written once. This module and
`parallel.py` are the training room's only ones that know torch.distributed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import UserError
from andrea.training.elastic import RankError, RankLost

Result = TypeVar("Result")
FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by it, and by jobs of ours
LOST_CONTACT = re.compile(r"gloo|nccl|Connection (closed|reset|refused)|Broken pipe|Socket", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. Alone there is nobody to talk to: every method returns what it was given."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def joined(self) -> bool:
        """Whether torchrun started this process, be it alone."""
        return dist.is_available() and dist.is_initialized()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def told(self, work: Callable[[], Result]) -> Result:
        """Rank 0 does the work and tells the others its result, or the UserError that it ended with."""
        if self.size == 1:
            return work()
        message: list[Any] = [None, None]
        if self.first:
            try:
                message[0] = work()
            except UserError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message)
        if message[1] is not None:
            raise ToldError(message[1])
        return message[0]

    def first_then_others(self, work: Callable[[], Result]) -> Result:
        """Every rank does the work, the others once rank 0 has made what they will find."""
        if not self.first:
            self.told(lambda: None)
            return work()
        results: list[Result] = []
        self.told(lambda: results.append(work()))
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
        """This rank's part of `count` rows: the first of them, how many, and the most that any rank has."""
        most = -(-count // self.size)
        first = min(count, self.rank * most)
        return first, min(most, count - first), most


class ToldError(UserError):
    """A UserError of rank 0, raised on every rank; rank 0 alone shows it."""


@contextlib.contextmanager
def joined(watchdog_minutes: float) -> Iterator[Ranks]:
    """The ranks of the run that torchrun has started, or this process alone.

    Raises RankLost where a rank dies or stops answering; a rank that stands still is the watchdog's business, so the
    group's own time limit is longer than its.
    """
    if not all(name in os.environ for name in FROM_TORCHRUN):
        yield Ranks()
        return
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())
    limit = datetime.timedelta(minutes=2 * watchdog_minutes + 1)
    with contact_watched():
        dist.init_process_group(backend, timeout=limit)
    try:
        with contact_watched():
            yield ranks
            dist.barrier()  # nobody leaves while another still writes or reads
    except ToldError:
        raise
    except UserError as error:
        raise error if ranks.first else RankError(f"rank {ranks.rank}: {error}") from error
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def contact_watched() -> Iterator[None]:
    """Turns what torch raises when another rank is gone into RankLost."""
    try:
        yield
    except RuntimeError as error:
        is_distributed = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        if is_distributed or LOST_CONTACT.search(str(error)):
            raise RankLost(str(error).strip().splitlines()[0]) from error
        raise
