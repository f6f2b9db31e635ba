"""FSDP2, torch's `fully_shard`: parameters sharded over S ranks. n matrices of one shape, R rows and C columns each."""

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from andrea.config import ParallelConfig
from andrea.model.gpt import GPT
from andrea.runtime.compiling import compile_graph
from andrea.training.loss.loss import MicroBatchLoss
from andrea.training.parallel.ranks import Parallel, Ranks


class FullySharded(Parallel):
    """Each rank keeps some rows of each parameter; a block's parameters are gathered when the block runs.

    make_model: makes an unsharded model of the same shapes, for `gathered_model`.
    """

    is_sharded = True

    def __init__(
        self,
        model: GPT,
        ranks: Ranks,
        config: ParallelConfig,
        device: torch.device,
        precision: torch.dtype,
        make_model: Callable[[], GPT],
    ) -> None:
        super().__init__(model, ranks)
        self.device, self.offload, self.precision = device, config.kind == "fsdp_offload", precision
        self.make_model = make_model
        self.mesh = init_device_mesh(device.type, (ranks.size,))
        self.shard_group = self.mesh.get_group()

    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        """compile_mode "on" acts like "blocks": each block and the loss are compiled separately.

        The parameters of a block are gathered before it runs, and gathering must happen outside compiled code.
        """
        if compile_mode != "off":
            for block in self.model.blocks:
                block.forward = compile_graph(block.forward)
            loss.head_loss = compile_graph(loss.head_loss)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        # Blocks are gathered in the precision of their matrix products. The other parameters stay fp32, as on one device.
        low_precision = None if self.precision == torch.float32 else self.precision
        block_precision = MixedPrecisionPolicy(
            param_dtype=low_precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=block_precision, offload_policy=offload)
        register_fsdp_forward_method(self.model.blocks[0], "values")
        # `values` returns a view. The warning is about views that are changed in place, which no layer does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self.wrapped = fully_shard(loss, mesh=self.mesh, offload_policy=offload)
        self.local_parameters = {
            name: nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
        }
        return self.wrapped

    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        self.wrapped.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def set_local_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.local_parameters[name].grad = parameter.grad.to_local() if parameter.grad is not None else None

    def zero_gradients(self) -> None:
        super().zero_gradients()
        for parameter in self.model.parameters():
            parameter.grad = None

    def norm_over_shards(self, local_norm: Tensor) -> Tensor:
        return self.sum_over_shards(local_norm.square()).sqrt()

    def sum_over_shards(self, local_sums: Tensor) -> Tensor:
        sums = local_sums.clone()
        dist.all_reduce(sums, group=self.shard_group)
        return sums

    def local_rows(self, name: str) -> slice:
        """The rows are divided like torch.chunk: equal shards, of which the last may be shorter or empty."""
        n_row = self.shapes[name][0]
        most = -(-n_row // self.ranks.size)
        return slice(min(n_row, self.ranks.rank * most), min(n_row, (self.ranks.rank + 1) * most))

    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Each rank gathers its share of whole matrices, applies `function`, and sends the others their rows of the results."""
        (n, rows_here, columns), size = local_matrices.shape, self.ranks.size
        share, most = -(-n // size), -(-n_row // size)  # matrices per rank; rows per shard
        padded = local_matrices.new_zeros(size, share, most, columns)
        padded.view(size * share, most, columns)[:n, :rows_here] = local_matrices
        received = torch.empty_like(padded)  # (rank that keeps the rows, matrix, its rows, C)
        dist.all_to_all_single(received, padded, group=self.shard_group)
        full = received.transpose(0, 1).reshape(share, size * most, columns)[:, :n_row]
        results = local_matrices.new_zeros(share, size * most, columns)
        results[:, :n_row] = function(full)
        to_send = results.view(share, size, most, columns).transpose(0, 1).contiguous()
        dist.all_to_all_single(received, to_send, group=self.shard_group)
        return received.view(size * share, most, columns)[:n, :rows_here]

    def drop_gathered(self) -> None:
        self.wrapped.reshard()  # after an evaluation the parameters outside the blocks are still gathered

    @torch.no_grad()
    def gathered_model(self) -> GPT | None:
        """A copy of the model on rank 0, gathered parameter by parameter; in CPU memory if parameters are offloaded."""
        self.drop_gathered()
        weights = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            gathered = parameter.full_tensor()
            if self.ranks.is_rank_0:
                weights[name] = gathered.to("cpu" if self.offload else self.device)
        if not self.ranks.is_rank_0:
            return None
        with torch.device("meta"):
            copy = self.make_model()
        copy.load_state_dict(weights, assign=True)
        for name, buffer in self.model.named_buffers():  # tables that are not in the state_dict
            module, _, own_name = name.rpartition(".")
            copy.get_submodule(module).register_buffer(
                own_name, buffer.to(weights["embedding.weight"].device), persistent=False
            )
        return copy
