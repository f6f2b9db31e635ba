"""`Parallel`: how the ranks of a run share the model and the work of a training step.

Every rank computes gradients from its own rows of the step's batch. `Parallel` itself is one process, `DataParallel`
(below) keeps the whole model on each rank, and `FullySharded` (fsdp.py) keeps a shard of each parameter on each rank.
All three compute the same update. The optimizer works on plain tensors, `local_parameters`, whose gradients are already
summed over ranks.

n matrices of one shape, R rows and C columns each.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andrea.attention import HeadStatistics
from andrea.config import UserError
from andrea.model.gpt import GPT
from andrea.runtime.compiling import compile_graph
from andrea.runtime.torchrun import ErrorOfRank0
from andrea.training.loss.micro_batch import MicroBatchLoss


class Parallel:
    """One process with the whole model, and the base class of the ways in which ranks share it and the work of a step.

    local_parameters: name -> this rank's rows of the parameter, as a plain tensor. shapes: name -> shape of the whole
    parameter.
    """

    is_sharded = False  # whether a rank keeps only some rows of each parameter

    def __init__(self, model: GPT, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.model = model
        self.local_parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        """The module that training calls instead of `loss`.

        compile_mode: "on" (one graph), "blocks" or "off"; torch compiles at the first call.
        """
        return compile_loss(loss, compile_mode)

    def uncompile(self, loss: MicroBatchLoss) -> None:
        """Undo the compiling of `wrap`: delete the compiled functions, so that the class's methods are called again."""
        for module in (loss, *self.model.blocks):
            for name in ("forward", "forward_in_precision", "call_block", "head_loss"):
                vars(module).pop(name, None)

    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch. Only the step's last micro-batch (`last`) sums the gradients over ranks."""
        return contextlib.nullcontext()

    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """This rank's rows of function(matrices).

        local_matrices (n, rows on this rank, C): this rank's rows of n matrices with R = n_row rows. function: maps a
        stack (k, R, C) to a stack of the same shape, each matrix independently. The ranks divide the n matrices among
        themselves.
        """
        return function(local_matrices)

    def set_local_gradients(self) -> None:
        """After the step's last backward pass: give each local parameter its rows of the summed gradient."""

    def norm_over_shards(self, local_norm: Tensor) -> Tensor:
        """The norm over the whole model, 0-dim, from the norm over this rank's local parameters."""
        return local_norm

    def sum_over_shards(self, local_sums: Tensor) -> Tensor:
        """Sums over the whole model, from sums over this rank's local parameters."""
        return local_sums

    def local_rows(self, name: str) -> slice:
        """The rows of the parameter `name` that this rank keeps."""
        return slice(0, self.shapes[name][0])

    def drop_gathered(self) -> None:
        """Drop gathered copies of the parameters, because `local_parameters` have changed outside of a training step."""

    def gathered_model(self) -> GPT | None:
        """The model with all its weights on rank 0, None on the other ranks. All ranks must call this."""
        return self.model if self.ranks.is_rank_0 else None

    def zero_gradients(self) -> None:
        for parameter in self.local_parameters.values():
            parameter.grad = None


def compile_loss(loss: MicroBatchLoss, compile_mode: str) -> MicroBatchLoss:
    """Compile `loss` in place.

    on: forward and loss as one graph, which DDP splits at the boundaries of its gradient buckets.
    blocks: one graph for all blocks, and one for the loss. Compiling takes a fraction of the time and does not depend
    on the number of blocks; a step takes a few percent longer.
    """
    if compile_mode == "on":
        loss.forward_in_precision = compile_graph(loss.forward_in_precision)
    if compile_mode == "blocks":
        loss.call_block = compile_graph(loss.call_block)
        loss.head_loss = compile_graph(loss.head_loss)
    return loss


# ---------------------------------------------------------------------------------------------------------------- ranks
# `Ranks`: the processes of one run, and the collectives that the training code needs.
#
# A rank is one process of the run. Rank 0 chooses names, prints, logs and writes the files that exist once. Figures are
# reduced over ranks: sums, minima and maxima are the same on every rank afterwards.

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


# ------------------------------------------------------------------------------------------------------------------ ddp
# Data parallelism: the whole model on every rank (DDP; Li et al. 2020, arXiv 2006.15704).

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class DataParallel(Parallel):
    """The whole model on every rank. Gradients are summed over ranks while the backward pass still runs."""

    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        compiled_loss = compile_loss(loss, compile_mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames 2.11's broadcast_buffers
            self.wrapped = DistributedDataParallel(compiled_loss, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self.wrapped

    @contextlib.contextmanager
    def sync_gradients(self, last: bool) -> Iterator[None]:
        # DDP averages over ranks. The training step multiplies the loss by the number of ranks, so gradients are sums.
        with contextlib.nullcontext() if last else self.wrapped.no_sync():
            yield

    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Each rank applies `function` to its share of the n matrices. Then every rank gathers all results."""
        n, size, rank = len(local_matrices), self.ranks.size, self.ranks.rank
        share = -(-n // size)  # matrices per rank; the stack is zero-padded to share * size
        padded = torch.cat([local_matrices, local_matrices.new_zeros(share * size - n, *local_matrices.shape[1:])])
        results_here = function(padded[rank * share : (rank + 1) * share]).contiguous()
        results = torch.empty_like(padded)
        all_gather(results, results_here)
        return results[:n]
