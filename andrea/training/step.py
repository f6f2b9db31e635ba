"""One training step: forward and backward over micro-batches, then the optimizer.

N sequences in a step, T tokens each; a micro-batch is B of the N. L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import RunConfig, UserError
from andrea.text.loader import IGNORED_TARGET, Loader
from andrea.training.optimizer.loss_scale import LossScale
from andrea.training.optimizer.optimizer import Optimizer
from andrea.training.optimizer.qk_clip import clip_logits
from andrea.training.optimizer.update_size import sampled_weights, update_ratios
from andrea.training.parallel.strategy import Parallel
from andrea.training.records.console import Console


class Batch(NamedTuple):
    """This rank's share of a step's sequences; n_target counts the targets in the rows of all ranks."""

    tokens: Tensor  # (n, T) int64
    targets: Tensor  # (n, T) int64
    n_target: int


class Update(NamedTuple):
    """What one optimizer step did, over all ranks; tensors on the device, which the host has not waited for."""

    loss: Tensor  # nats per token, 0-dim
    gradient_norm: Tensor  # before clipping, 0-dim
    finite: Tensor  # 0-dim bool; where it is false, nothing was changed
    stop_flags: Tensor  # (2,): StopRequests.flags, summed
    heads: HeadStatistics | None  # (L, H), where every step measures them
    size_ratios: Tensor | None  # (matrices,): size of the change over size of the weights, where it was asked for


@dataclass
class TrainingStep:
    """One optimizer step over all ranks: `update(batch(step), rate)`.

    loss_sum: tokens, targets (B, T) -> nats, 0-dim, and the heads' statistics where every step measures them.
    """

    config: RunConfig
    parallel: Parallel
    loss_sum: Callable[[Tensor, Tensor], tuple[Tensor, HeadStatistics | None]]
    optimizer: Optimizer
    scale: LossScale
    loader: Loader
    device: torch.device
    console: Console

    def __post_init__(self) -> None:
        assert isinstance(self.config.train.micro_batch, int), "auto is resolved before the step is made"
        self.ranks = self.parallel.ranks
        self.most_rows = self.ranks.local_rows(self.config.sequences_per_step).most_on_a_rank
        self.micro_batch = self.config.train.micro_batch  # halved where memory runs out
        self.clipped_heads = torch.zeros((), device=self.device)  # by QK-clip, since they were last read

    def batch(self, step: int) -> Batch:
        """The sequences of the step that follows `step` others."""
        n = self.config.sequences_per_step
        first, count, _ = self.ranks.local_rows(n)
        tokens, targets = self.loader.batch(step * n + first, count)
        if self.device.type == "cuda":  # a copy from pinned memory to the card need not be waited for
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return Batch(tokens, targets, self.loader.count_targets(step * n, n))

    def update(self, batch: Batch, rate: float, stop_flags: Callable[[], list[Tensor]], measure_size: bool) -> Update:
        """Forward, backward and the optimizer at `rate` times its peak rates.

        The weights change only where loss and gradient are finite on all ranks. stop_flags: StopRequests.flags,
        called as late as possible. measure_size: also measure how large the change of the weights is.
        """
        nats, heads = self.accumulate(batch)
        nats, *summed_flags = self.ranks.sum(torch.stack([nats, *stop_flags()])).unbind()
        heads = self.ranks.merge_head_statistics(heads) if heads else None
        self.parallel.set_local_gradients()
        if self.scale.active:
            self.scale.unscale(self.optimizer.parameters)
        norm = self.optimizer.clip()
        finite = torch.isfinite(norm) & torch.isfinite(nats)
        before = sampled_weights(self.parallel) if measure_size else None
        self.optimizer.step(rate, finite)
        ratios = (
            update_ratios(before, sampled_weights(self.parallel), self.parallel.sum_over_shards) if before else None
        )
        self.parallel.zero_gradients()
        if self.scale.active:
            self.scale.update(finite)
        if self.config.attention.qk_clip is not None:
            self.clipped_heads += clip_logits(self.parallel, heads.largest_logit, self.config.attention.qk_clip, finite)
        return Update(nats / batch.n_target, norm, finite, torch.stack(summed_flags), heads, ratios)

    def accumulate(self, batch: Batch) -> tuple[Tensor, HeadStatistics | None]:
        """Forward and backward over this rank's micro-batches: their summed loss in nats, and the heads' statistics (L, H).

        Gradients are summed over ranks in the last one. Where memory runs out, the micro-batch is halved and all of
        them are run again.
        """
        while True:
            try:
                nats, heads = torch.zeros((), device=self.device), None
                pieces = list(micro_batches(batch.tokens, batch.targets, self.micro_batch, self.most_rows))
                for index, piece in enumerate(pieces):
                    with self.parallel.sync_gradients(last=index == len(pieces) - 1):
                        micro_nats, measured = self.loss_sum(*(t.to(self.device, non_blocking=True) for t in piece))
                        # DDP and FSDP divide summed gradients by the number of ranks: multiply by it first.
                        (micro_nats * self.scale.factor * self.ranks.size / batch.n_target).backward()
                    nats += micro_nats.detach()
                    heads = measured.merged(heads) if measured and heads else measured
                return nats, heads
            except torch.OutOfMemoryError:
                if self.micro_batch == 1 or self.ranks.size > 1:  # other ranks are in the middle of the same step
                    raise UserError(
                        f"out of memory with train.micro_batch={self.micro_batch}; lower it, or turn on "
                        f"train.activation_checkpointing, or use parallel=fsdp on more ranks"
                    ) from None
                self.micro_batch = (self.micro_batch + 1) // 2
                self.parallel.zero_gradients()
            torch.cuda.empty_cache()
            self.console.say(f"out of memory: the step is run again with train.micro_batch={self.micro_batch}")

    def take_clipped_heads(self) -> int:
        """Heads clipped since the last call."""
        clipped, self.clipped_heads = int(self.clipped_heads), torch.zeros_like(self.clipped_heads)
        return clipped


def micro_batches(tokens: Tensor, targets: Tensor, size: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut (n, T) into pieces of exactly (size, T), as many as `rows` rows take; missing rows are filled without targets."""
    for start in range(0, rows, size):
        micro_tokens, micro_targets = tokens[start : start + size], targets[start : start + size]
        missing = (size - len(micro_tokens), tokens.shape[1])
        if missing[0]:
            micro_tokens = torch.cat([micro_tokens, micro_tokens.new_zeros(missing)])
            micro_targets = torch.cat([micro_targets, micro_targets.new_full(missing, IGNORED_TARGET)])
        yield micro_tokens, micro_targets
