"""The largest micro-batch that fits, found by trying."""

from __future__ import annotations

from collections.abc import Callable

import torch

from andrea.config import UserError


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
