"""How the ranks of a run share a step: what each keeps of the model, and when and how gradients are added up.

Every rank works on its own rows of the step's batch. `Alone` is one process; `Replicated` (DDP) keeps the whole model on
each rank; `Sharded` (FSDP2) keeps of each parameter a share of the rows and gathers a block when it is needed. All three
compute the same update: what the optimizer sees are plain tensors, `parts`, whose gradients are already sums over ranks.

n matrices of one shape, R rows, C columns, S ranks that share a copy of the model.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from andrea.config import ParallelConfig
from andrea.model.gpt import GPT
from andrea.training.loss.loss import MicroLoss
from andrea.training.parallel.ranks import Ranks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
Orthogonalise = Callable[[Tensor], Tensor]  # (n, R, C) -> (n, R, C)


class Parallel(ABC):
    """parts: by name, what this rank keeps of each parameter: the optimizer's own view of it, a plain tensor."""

    def __init__(self, model: GPT, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.model = model
        self.local_parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    @abstractmethod
    def wrap(self, loss: MicroLoss, compiled: str) -> nn.Module:
        """The module to call in training instead of `loss`; compiled at the first call: "on" (one graph), "blocks" or "off"."""

    def uncompile(self, loss: MicroLoss) -> None:
        """Take back what `wrap` compiled: the instance's own attribute hides the class's method."""
        for module in (loss, *self.model.blocks):
            for name in ("forward", "in_precision", "run_block", "score"):
                vars(module).pop(name, None)

    @abstractmethod
    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-step: gradients are added up over ranks in its backward only where it is the step's last."""

    @abstractmethod
    def orthogonalised(self, stack: Tensor, rows: int, orthogonalise: Orthogonalise) -> Tensor:
        """Of matrices (n, R, C), of which this rank keeps what it keeps, the same part of the orthogonalised ones."""

    def take_gradients(self) -> None:  # noqa: B027 (nothing to do where parts are the model's own parameters)
        """After the last backward: each part's `grad` is its share of the summed gradient."""

    def norm(self, of_parts: Tensor) -> Tensor:
        """The norm over the whole model, from this rank's over its parts; 0-dim."""
        return of_parts

    def added(self, of_parts: Tensor) -> Tensor:
        """Sums over the whole model, from this rank's over its parts."""
        return of_parts

    def rows(self, name: str) -> slice:
        """The rows of the parameter that this rank keeps."""
        return slice(0, self.shapes[name][0])

    def gathered_model(self) -> GPT | None:
        """The model with all its weights, to look at: on rank 0; None elsewhere. All ranks must ask."""
        return self.model if self.ranks.is_rank_0 else None

    def zero_gradients(self) -> None:
        for part in self.local_parameters.values():
            part.grad = None


class Alone(Parallel):
    """One process."""

    def wrap(self, loss: MicroLoss, compiled: str) -> nn.Module:
        return compiled_as(compiled, loss)

    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def orthogonalised(self, stack: Tensor, rows: int, orthogonalise: Orthogonalise) -> Tensor:
        return orthogonalise(stack)


class Replicated(Parallel):
    """The whole model on every rank; gradients are added up while the backward still runs (Li et al. 2020)."""

    def wrap(self, loss: MicroLoss, compiled: str) -> nn.Module:
        inner = compiled_as(compiled, loss)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # torch 2.13 has a new name for what 2.11 calls broadcast_buffers
            self.wrapped = DistributedDataParallel(inner, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self.wrapped

    @contextlib.contextmanager
    def sync_gradients(self, last: bool):
        # DDP divides the sum by the number of ranks; the trainer multiplies the loss by it
        with contextlib.nullcontext() if last else self.wrapped.no_sync():
            yield

    def orthogonalised(self, stack: Tensor, rows: int, orthogonalise: Orthogonalise) -> Tensor:
        """Each rank does its share of the matrices, and all get all of them."""
        n, size = len(stack), self.ranks.size
        share = -(-n // size)
        padded = torch.cat([stack, stack.new_zeros(share * size - n, *stack.shape[1:])])
        mine = orthogonalise(padded[self.ranks.rank * share : (self.ranks.rank + 1) * share]).contiguous()
        of_all = torch.empty_like(padded)
        all_gather(of_all, mine)
        return of_all[:n]


class Sharded(Parallel):
    """Of each parameter a share of its rows on each rank (FSDP2), gathered block by block when they are needed.

    With config.shard_ranks S below the number of ranks, S of them (say, a node's) share one copy, and the copies'
    gradients are added up over the others (HSDP).
    """

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
        self.device, self.offload, self.precision = device, config.cpu_offload, precision
        self.make_model = make_model
        sharing = config.shard_ranks or ranks.size
        assert ranks.size % sharing == 0, "checked at the start"
        if sharing == ranks.size:
            self.mesh = init_device_mesh(device.type, (sharing,), mesh_dim_names=("shard",))
        else:
            shape = (ranks.size // sharing, sharing)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        self.sharing = self.mesh["shard"]
        self.group, self.place = self.sharing.get_group(), self.sharing.get_local_rank()

    def wrap(self, loss: MicroLoss, compiled: str) -> nn.Module:
        """Blocks and the loss are compiled one by one in any case: gathering goes on between them, outside the compiled code."""
        if compiled != "off":
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
            loss.score = torch.compile(loss.score, dynamic=False, fullgraph=True)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        # Blocks are gathered in the precision they multiply in; what stands around them stays fp32, as on one device.
        low = None if self.precision == torch.float32 else self.precision
        of_blocks = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=of_blocks, offload_policy=offload)
        register_fsdp_forward_method(self.model.blocks[0], "values")
        self.wrapped = fully_shard(loss, mesh=self.mesh, offload_policy=offload)
        self.local_parameters = {
            name: nn.Parameter(parameter.to_local().detach()) for name, parameter in self.model.named_parameters()
        }
        return self.wrapped

    @contextlib.contextmanager
    def sync_gradients(self, last: bool):
        self.wrapped.set_requires_gradient_sync(last)
        yield

    def take_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.local_parameters[name].grad = parameter.grad.to_local() if parameter.grad is not None else None

    def zero_gradients(self) -> None:
        super().zero_gradients()
        for parameter in self.model.parameters():
            parameter.grad = None

    def norm(self, of_parts: Tensor) -> Tensor:
        return self.added(of_parts.square()).sqrt()

    def added(self, of_parts: Tensor) -> Tensor:
        of_parts = of_parts.clone()
        dist.all_reduce(of_parts, group=self.group)
        return of_parts

    def rows(self, name: str) -> slice:
        """Shares are cut as torch.chunk cuts: of equal size, the last ones shorter or empty."""
        rows = self.shapes[name][0]
        most = -(-rows // self.sharing.size())
        return slice(min(rows, self.place * most), min(rows, (self.place + 1) * most))

    def orthogonalised(self, stack: Tensor, rows: int, orthogonalise: Orthogonalise) -> Tensor:
        """Each rank gathers its share of the matrices whole, orthogonalises them and sends every rank its rows back."""
        (n, rows_here, columns), size = stack.shape, self.sharing.size()
        share, most = -(-n // size), -(-rows // size)
        padded = stack.new_zeros(size, share, most, columns)
        padded.view(size * share, most, columns)[:n, :rows_here] = stack
        received = torch.empty_like(padded)  # (rank whose rows they are, matrix, rows, C)
        dist.all_to_all_single(received, padded, group=self.group)
        whole = received.transpose(0, 1).reshape(share, size * most, columns)[:, :rows]
        done = stack.new_zeros(share, size * most, columns)
        done[:, :rows] = orthogonalise(whole)
        to_send = done.view(share, size, most, columns).transpose(0, 1).contiguous()
        dist.all_to_all_single(received, to_send, group=self.group)
        return received.view(size * share, most, columns)[:n, :rows_here]

    @torch.no_grad()
    def gathered_model(self) -> GPT | None:
        """A copy, gathered parameter by parameter; in the CPU's memory where the card has no room for the model."""
        self.wrapped.reshard()  # an evaluation leaves what stands around the blocks gathered
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
        for name, buffer in self.model.named_buffers():  # tables that no checkpoint holds
            module, _, own_name = name.rpartition(".")
            copy.get_submodule(module).register_buffer(
                own_name, buffer.to(weights["embedding.weight"].device), persistent=False
            )
        return copy


def compiled_as(compiled: str, loss: MicroLoss) -> MicroLoss:
    """on: one graph, forward and loss, which DDP cuts where its buckets of gradients end. blocks: one for all blocks, one
    for the loss: a fraction of the compiling, whatever the depth, and a few percent slower.
    """
    if compiled == "on":
        loss.in_precision = torch.compile(loss.in_precision, dynamic=False, fullgraph=True)
    if compiled == "blocks":
        loss.run_block = torch.compile(loss.run_block, dynamic=False, fullgraph=True)
        loss.score = torch.compile(loss.score, dynamic=False, fullgraph=True)
    return loss


def cpu_mesh(parallel: Sharded) -> DeviceMesh:
    """The same layout on the CPU, to describe there what a checkpoint holds."""
    names = parallel.mesh.mesh_dim_names
    return init_device_mesh("cpu", tuple(parallel.mesh.mesh.shape), mesh_dim_names=names)
