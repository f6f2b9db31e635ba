"""Data parallelism: the whole model on every rank (DDP; Li et al. 2020, arXiv 2006.15704)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andrea.training.loss.micro_batch import MicroBatchLoss
from andrea.training.parallel.strategy import Parallel, compile_loss

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
