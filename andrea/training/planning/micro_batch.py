"""The largest micro-batch that fits, found by trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from andrea.config import RunConfig, UserError
from andrea.training.loss.micro_batch import MicroBatchLoss
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.strategy import Parallel
from andrea.training.planning import plan
from andrea.training.planning.settle import measures_every_step
from andrea.training.records.console import Console


def largest_that_fits(try_one: Callable[[int], None], candidates: list[int]) -> int:
    """The first of `candidates`, which fall, with which try_one(n) does not run out of memory. Raises UserError.

    try_one: forward and backward of n sequences, which leaves nothing behind. It must run beside all that a later step
    holds: a first step has no gradients and no optimizer state yet, so that their bytes are to be set aside.
    """
    for n_sequence in candidates:
        try:
            try_one(n_sequence)
            return n_sequence
        except torch.OutOfMemoryError:
            pass  # what was raised holds on to the tensors of the frames it came through: leave it before freeing
        torch.cuda.empty_cache()
    raise UserError(
        f"train.micro_batch=auto, tried down to {candidates[-1]}: the card's memory is too small; set "
        f"train.activation_checkpointing=true, a smaller model or model.sequence_length, or parallel=fsdp on several cards"
    )


def with_tried_micro_batch(
    run: RunConfig, parallel: Parallel, device: torch.device, room: float, console: Console
) -> RunConfig:
    """The largest micro-batch that really fits, from the planned one downwards: eagerly, which keeps no less than compiled
    code and takes seconds. A sharded model cannot be tried on one rank alone: the plan holds.
    """
    if isinstance(parallel, FullySharded):
        return run
    n_vocab, length = parallel.model.n_vocab, run.model.sequence_length
    micro = MicroBatchLoss(
        parallel.model, device, run.precision, measures_every_step(run), run.train.activation_checkpointing
    )

    def try_one(n_sequence: int) -> None:
        planned = plan.memory_of(run, n_vocab, n_sequence, device, run.precision)
        set_aside = torch.empty(planned.optimizer, dtype=torch.uint8, device=device)
        tokens, targets = (torch.zeros(n_sequence, length, dtype=torch.int64, device=device) for _ in range(2))
        try:
            micro(tokens, targets)[0].backward()
        finally:
            parallel.zero_gradients()
            del set_aside

    candidates = plan.micro_batches_that_fit(run, n_vocab, device, run.precision, plan.ROOM * room, parallel.ranks.size)
    fits = largest_that_fits(try_one, [n for n in candidates if n <= run.train.micro_batch])
    fits = int(parallel.ranks.minimum(torch.tensor(fits)))
    console.say(f"micro-batch: {fits} sequences, the largest that fits here (tried)")
    return dataclasses.replace(run, train=dataclasses.replace(run.train, micro_batch=fits))
