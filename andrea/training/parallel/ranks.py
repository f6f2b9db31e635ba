"""`Ranks`: the processes of one run, and the collectives that the training code needs.

A rank is one process of the run. Rank 0 chooses names, prints, logs and writes the files that exist once. Figures are
reduced over ranks: sums, minima and maxima are the same on every rank afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import UserError
from andrea.runtime.torchrun import ErrorOfRank0

Result = TypeVar("Result")


class LocalRows(NamedTuple):
    """The rows of a batch that one rank works on."""

    first: int
    count: int  # may be 0 if there are fewer rows than ranks
    most_on_a_rank: int


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the processes of the run. With one process, the collectives return their input."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 1

    @property
    def started_by_torchrun(self) -> bool:
        """Whether torchrun started this process: a process group then exists, even if the run has one process only."""
        return dist.is_available() and dist.is_initialized()

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    def from_rank_0(self, work: Callable[[], Result]) -> Result:
        """Do `work` on rank 0 alone and return its result on every rank. All ranks must call this.

        Raises, on every rank, the UserError that `work` raised on rank 0.
        """
        if self.size == 1:
            return work()
        message: list[Any] = [None, None]  # result, text of the error
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
        """Do `work` on rank 0, then on all others, so that they find the files of rank 0. All ranks must call this."""
        if not self.is_rank_0:
            self.from_rank_0(lambda: None)
            return work()
        results: list[Result] = []
        self.from_rank_0(lambda: results.append(work()))
        return results[0]

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
        return self.reduce(numbers, dist.ReduceOp.SUM)

    def maximum(self, numbers: Tensor) -> Tensor:
        """The maximum over all ranks, element by element."""
        return self.reduce(numbers, dist.ReduceOp.MAX)

    def minimum(self, numbers: Tensor) -> Tensor:
        """The minimum over all ranks, element by element."""
        return self.reduce(numbers, dist.ReduceOp.MIN)

    def reduce(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return numbers
        numbers = numbers.detach().clone()
        dist.all_reduce(numbers, operation)
        return numbers

    def merge_head_statistics(self, measured: HeadStatistics) -> HeadStatistics:
        """Statistics (L, H) over the sequences of all ranks: sums are added, the largest logit is the maximum."""
        if self.size == 1:
            return measured
        there = {name: part for name, part in measured._asdict().items() if part is not None}
        sums = self.sum(torch.stack(tuple(there.values()))).unbind()
        return HeadStatistics(**dict(zip(there, sums, strict=True)))._replace(
            largest_logit=self.maximum(measured.largest_logit)
        )

    def local_rows(self, count: int) -> LocalRows:
        """This rank's part of `count` rows. Parts are consecutive, and their sizes differ by at most one row."""
        each, left = divmod(count, self.size)
        return LocalRows(
            first=self.rank * each + min(self.rank, left),
            count=each + (self.rank < left),
            most_on_a_rank=each + (left > 0),
        )
