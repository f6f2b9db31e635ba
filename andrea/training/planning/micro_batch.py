"""The micro-batch: the largest that is planned to fit in memory, and on a card the largest that was tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from andrea.config import RunConfig, UserError
from andrea.model.size import flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.training.heads import measures_every_step
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
        recompute=config.train.activation_checkpointing,
        compiled=choose_compile(config.compile, placement.device, flops).value != "off",
        on_cpu=placement.device.type == "cpu",
        ranks=placement.ranks,
        sharded=placement.sharded,
    )


def micro_batches_that_fit(config: RunConfig, n_vocab: int, placement: Placement, capacity_bytes: float) -> list[int]:
    """The divisors of a rank's sequences of a step that are planned to fit, largest first; 1 is always among them."""
    sequences = -(-config.sequences_per_step // placement.ranks)
    most = sequences
    if placement.device.type == "cpu":
        most = max(1, min(most, TOKENS_IN_PASS_ON_CPU // config.model.sequence_length))
    smallest, largest = (memory_of(config, n_vocab, n, placement) for n in (1, most))
    # The memory of a pass is the maximum over several moments, each linear in n, so that it is convex in n: between two
    # counted sizes the chord lies above it. Counting is needed only where the chord says that a size does not fit.
    slope = (largest.activations - smallest.activations) / max(1, most - 1)
    fitting = [1]
    for n in (n for n in range(2, most + 1) if sequences % n == 0):
        by_chord = dataclasses.replace(smallest, activations=smallest.activations + round(slope * (n - 1)))
        if by_chord.total > capacity_bytes and memory_of(config, n_vocab, n, placement).total > capacity_bytes:
            break
        fitting.append(n)
    return fitting[::-1]


def largest_that_fits(try_one: Callable[[int], None], candidates: list[int]) -> int:
    """The first of `candidates`, in falling order, with which try_one(n) does not run out of memory. Raises UserError.

    try_one runs forward and backward of n sequences and leaves nothing behind. A first step holds no gradients and no
    optimizer state yet, so try_one must set their bytes aside.
    """
    for n_sequence in candidates:
        try:
            try_one(n_sequence)
            return n_sequence
        except torch.OutOfMemoryError:
            pass  # the exception keeps the tensors of its frames alive: leave this block before freeing memory
        torch.cuda.empty_cache()
    raise UserError(
        f"train.micro_batch=auto, tried down to {candidates[-1]}: the card's memory is too small; set "
        f"train.activation_checkpointing=true, a smaller model or model.sequence_length, or parallel=fsdp on several cards"
    )


def with_tried_micro_batch(config: RunConfig, parallel: Parallel, machine: Machine, console: Console) -> RunConfig:
    """The config with the largest micro-batch that fits when tried, from the planned one downwards.

    It is tried without torch.compile, which takes seconds and no less memory than compiled code. A sharded model cannot
    be tried on one rank alone: its plan holds.
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
    console.say(f"micro-batch: {fits} sequences, the largest that fits here (tried)")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=fits))
