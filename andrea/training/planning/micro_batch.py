"""Chooses the micro-batch: the largest that the memory plan allows, and on a GPU the largest that fits when tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from andrea.config import RunConfig, UserError
from andrea.model.size import flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.training.heads import measures_every_step
from andrea.training.loss.distillation import Teachers
from andrea.training.loss.micro_batch import MicroBatchLoss
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.strategy import Parallel
from andrea.training.planning.machine import USABLE_SHARE, Machine, Placement
from andrea.training.planning.memory import Memory, plan_memory
from andrea.training.records.console import Console

TOKENS_IN_PASS_ON_CPU = 4096  # at most: on a CPU a longer pass is no faster and takes more memory


def memory_of(config: RunConfig, n_vocab: int, micro_batch: int, placement: Placement) -> Memory:
    """The memory plan of one rank for this micro-batch."""
    flops = config.steps * config.tokens_per_step * flops_per_token(config.model, config.attention, n_vocab)
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
