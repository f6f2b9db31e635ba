"""Chooses the micro-batch: the largest that the memory plan allows, and on a GPU the largest that fits when tried."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from andrea.config import RunConfig, UserError
from andrea.model.size import flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import Choice, choose_device
from andrea.runtime.program import typed_command
from andrea.training.health.attention import measures_every_step
from andrea.training.loss.micro_batch import MicroBatchLoss, Teachers
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.strategy import Parallel, Ranks
from andrea.training.planning.memory import Memory, plan_memory
from andrea.training.records.console import Console, format_memory

# -------------------------------------------------------------------------------------------------------------- machine
# Finds the device of each rank and its free memory.

GIB = 2**30
USABLE_SHARE = 0.8  # of the free memory: a plan is not exact, and other programs need memory too
CARD = torch.device("cuda")
FREE_ON_CARD = {24: 23 * GIB, 80: 78 * GIB}  # bytes that are free on a GPU of so many GB


@dataclass(frozen=True)
class Placement:
    """The facts that a memory plan needs: device, precision of the matrix products, number of ranks, FSDP or not."""

    device: torch.device
    precision: str
    ranks: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class Machine:
    """The device and memory that a run may use. free_bytes: the smallest free memory of any rank."""

    device: torch.device
    ranks: Ranks
    free_bytes: float

    @classmethod
    def of_rank(cls, asked_device: str, ranks: Ranks) -> Machine:
        """The machine as this rank uses it. Every rank must call this. Raises UserError for fewer GPUs than ranks."""
        device = ranks.rank_0_first(lambda: device_of_rank(asked_device, ranks))
        sharing = ranks.local_size if device.type == "cpu" else 1  # the ranks of one machine share its memory
        return cls(device, ranks, float(ranks.minimum(torch.tensor(free_bytes(device) / sharing))))


def device_of_rank(asked: str, ranks: Ranks) -> torch.device:
    """The device of a rank. A rank's own GPU is already its current device. Raises UserError for too few GPUs."""
    device = choose_device(asked)
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.size > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"device={asked} is one device, but there are {ranks.size} ranks; use device=cuda or device=cpu"
        )
    if 1 < cards < ranks.local_size:  # one visible GPU is fine: SLURM can show each rank a different one
        raise UserError(
            f"there are {ranks.local_size} ranks on this machine, but {cards} GPUs; use --nproc-per-node={cards}"
        )
    return device


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().split("\n")
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# ------------------------------------------------------------------------------------------------------------- parallel
# How the ranks share the model: one process, DDP (a copy on each rank) or FSDP2 (a shard on each rank).


def choose_sharing(config: RunConfig, machine: Machine, n_vocab: int) -> Choice:
    """Chooses none, ddp or fsdp for the ranks that torchrun started. Raises UserError for impossible settings."""
    ranks = machine.ranks
    chosen = Choice(config.parallel.kind.removesuffix("_offload"), "as configured")
    if config.parallel.kind == "auto":
        if not ranks.started_by_torchrun:
            return Choice("none", "one process")
        chosen = sharing_that_fits(config, n_vocab, Placement(CARD, config.precision, ranks.size), machine.free_bytes)
    if chosen.value == "fsdp" and not ranks.started_by_torchrun:
        raise UserError(
            f"parallel={config.parallel.kind} shards a model over the ranks of torchrun, but torchrun was not used; start with "
            f"`{typed_command('train', 'torchrun --standalone --nproc-per-node=2')} …`, or choose parallel=auto"
        )
    return chosen


def sharing_that_fits(config: RunConfig, n_vocab: int, placement: Placement, free_bytes: float) -> Choice:
    """Chooses ddp if the model, its gradients and optimizer state fit on each rank with one sequence, else fsdp.

    A single rank gets `none` in place of `ddp`.
    """
    capacity, ranks = USABLE_SHARE * free_bytes, placement.ranks
    alone = memory_of(config, n_vocab, 1, Placement(placement.device, placement.precision)).total
    why = (
        f"the whole model with one sequence needs {format_memory(alone)}, and a rank may use {format_memory(capacity)}"
    )
    if alone <= capacity:
        return Choice("ddp" if ranks > 1 else "none", why)
    sharded = memory_of(config, n_vocab, 1, Placement(placement.device, placement.precision, ranks, sharded=True)).total
    return Choice(
        "fsdp", why + (f"; sharded over {ranks} ranks, it needs {format_memory(sharded)} on each" if ranks > 1 else "")
    )


# ---------------------------------------------------------------------------------------------------------- micro-batch

TOKENS_IN_PASS_ON_CPU = 4096  # at most: on a CPU a longer pass is no faster and takes more memory


def flops_of_run(config: RunConfig, n_vocab: int) -> int:
    return config.steps * config.tokens_per_step * flops_per_token(config.model, config.attention, n_vocab)


def memory_of(config: RunConfig, n_vocab: int, micro_batch: int, placement: Placement) -> Memory:
    """The memory plan of one rank for this micro-batch."""
    flops = flops_of_run(config, n_vocab)
    return plan_memory(
        config.model,
        config.attention,
        n_vocab,
        micro_batch=micro_batch,
        precision=placement.precision,
        optimizer=config.optimizer.kind,
        averaged=config.optimizer.average_half_life is not None,
        recompute=config.train.activation_checkpointing,
        compiled=choose_compile(config.compile, placement.device, flops).value != "off",
        on_cpu=placement.device.type == "cpu",
        ranks=placement.ranks,
        sharded=placement.sharded,
        n_teacher=len(config.train.teachers),
    )


def micro_batches_that_fit(config: RunConfig, n_vocab: int, placement: Placement, capacity_bytes: float) -> list[int]:
    """The divisors of a rank's sequences per step that the memory plan allows, largest first. Always includes 1."""
    sequences = -(-config.sequences_per_step // placement.ranks)
    most = sequences
    if placement.device.type == "cpu":
        most = max(1, min(most, TOKENS_IN_PASS_ON_CPU // config.model.sequence_length))
    smallest, largest = (memory_of(config, n_vocab, n, placement) for n in (1, most))
    # The memory of a pass is the maximum of functions that are linear in n, so it is convex in n. Therefore the chord
    # between two counted sizes is an upper bound. A size is counted only if this bound does not fit.
    slope = (largest.activations - smallest.activations) / max(1, most - 1)
    fitting = [1]
    for n in (n for n in range(2, most + 1) if sequences % n == 0):
        by_chord = dataclasses.replace(smallest, activations=smallest.activations + round(slope * (n - 1)))
        if by_chord.total > capacity_bytes and memory_of(config, n_vocab, n, placement).total > capacity_bytes:
            break
        fitting.append(n)
    return fitting[::-1]


def largest_that_fits(try_one: Callable[[int], None], candidates: list[int]) -> int:
    """The first of `candidates` (largest first) for which try_one(n) does not run out of memory. Raises UserError.

    try_one runs the forward and backward pass of n sequences and frees its memory. There is no optimizer state before
    the first step, so try_one must reserve memory for it.
    """
    for n_sequence in candidates:
        try:
            try_one(n_sequence)
            return n_sequence
        except torch.OutOfMemoryError:
            pass  # the exception keeps the tensors of its frames alive: leave this block before freeing memory
        torch.cuda.empty_cache()
    raise UserError(
        f"train.micro_batch=auto: not even a micro-batch of {candidates[-1]} fits in the GPU's memory; set "
        f"train.activation_checkpointing=true, choose a smaller model or a smaller model.sequence_length, or use "
        f"parallel=fsdp on several GPUs"
    )


def with_tried_micro_batch(
    config: RunConfig, parallel: Parallel, machine: Machine, console: Console, teachers: Teachers | None = None
) -> RunConfig:
    """The config with the largest micro-batch that fits when tried, starting with the planned one.

    The trial runs without torch.compile: it takes seconds, and eager code needs at least as much memory as compiled
    code. A sharded model cannot be tried on one rank alone, so it keeps its planned micro-batch.
    """
    if isinstance(parallel, FullySharded):
        return config
    device, n_vocab, length = machine.device, parallel.model.n_vocab, config.model.sequence_length
    micro_loss = MicroBatchLoss(
        parallel.model,
        device,
        config.precision,
        measures_every_step(config.attention),
        config.train.activation_checkpointing,
        teachers,
    )

    def try_one(n_sequence: int) -> None:
        planned = memory_of(config, n_vocab, n_sequence, Placement(device, config.precision))
        set_aside = torch.empty(planned.optimizer, dtype=torch.uint8, device=device)
        tokens, targets = (torch.zeros(n_sequence, length, dtype=torch.int64, device=device) for _ in range(2))
        try:
            micro_loss(tokens, targets)[0].backward()
        finally:
            parallel.zero_gradients()
            del set_aside

    placement = Placement(device, config.precision, parallel.ranks.size)
    candidates = micro_batches_that_fit(config, n_vocab, placement, USABLE_SHARE * machine.free_bytes)
    fits = largest_that_fits(try_one, [n for n in candidates if n <= config.train.micro_batch])
    fits = int(parallel.ranks.minimum(torch.tensor(fits)))
    console.say(f"micro-batch: {fits} sequences, the largest that fitted when tried on this GPU")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=fits))
