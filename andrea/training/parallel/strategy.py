"""`Parallel`: how the ranks of a run share the model and the work of a training step.

Every rank computes gradients from its own rows of the step's batch. `SingleProcess` is one process, `DataParallel`
(ddp.py) keeps the whole model on each rank, and `FullySharded` (fsdp.py) keeps a shard of each parameter on each rank.
All three compute the same update. The optimizer works on plain tensors, `local_parameters`, whose gradients are already
summed over ranks.

n matrices of one shape, R rows and C columns each.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from andrea.model.gpt import GPT
from andrea.runtime.compiling import compile_graph
from andrea.training.loss.micro_batch import MicroBatchLoss
from andrea.training.parallel.ranks import Ranks


class Parallel(ABC):
    """Base class of the ways in which ranks share a model and the work of a training step.

    local_parameters: name -> this rank's rows of the parameter, as a plain tensor. shapes: name -> shape of the whole
    parameter.
    """

    is_sharded = False  # whether a rank keeps only some rows of each parameter

    def __init__(self, model: GPT, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.model = model
        self.local_parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    @abstractmethod
    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        """The module that training calls instead of `loss`.

        compile_mode: "on" (one graph), "blocks" or "off"; torch compiles at the first call.
        """

    def uncompile(self, loss: MicroBatchLoss) -> None:
        """Undo the compiling of `wrap`: delete the compiled functions, so that the class's methods are called again."""
        for module in (loss, *self.model.blocks):
            for name in ("forward", "forward_in_precision", "call_block", "head_loss"):
                vars(module).pop(name, None)

    @abstractmethod
    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch. Only the step's last micro-batch (`last`) sums the gradients over ranks."""

    @abstractmethod
    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """This rank's rows of function(matrices).

        local_matrices (n, rows on this rank, C): this rank's rows of n matrices with R = n_row rows. function: maps a
        stack (k, R, C) to a stack of the same shape, each matrix independently. The ranks divide the n matrices among
        themselves.
        """

    def set_local_gradients(self) -> None:  # noqa: B027 (nothing to do if these are the model's own parameters)
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

    def drop_gathered(self) -> None:  # noqa: B027 (nothing to do where no copies exist)
        """Drop gathered copies of the parameters, because `local_parameters` have changed outside of a training step."""

    def gathered_model(self) -> GPT | None:
        """The model with all its weights on rank 0, None on the other ranks. All ranks must call this."""
        return self.model if self.ranks.is_rank_0 else None

    def zero_gradients(self) -> None:
        for parameter in self.local_parameters.values():
            parameter.grad = None


class SingleProcess(Parallel):
    """One process with the whole model."""

    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        return compile_loss(loss, compile_mode)

    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        return function(local_matrices)


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
