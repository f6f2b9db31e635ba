"""One training step: forward and backward over micro-batches, then the optimizer.

N sequences of T tokens in a step: n of them on this rank, B in a micro-batch. L layers, H heads.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import RunConfig, UserError
from andrea.model.lora import B
from andrea.runtime.free_and_peak_memory import is_out_of_memory
from andrea.text.loader import Loader
from andrea.text.shards import IGNORED_TARGET, DataLost
from andrea.training.health.health import remedy_settings
from andrea.training.objectives.objective import Batch, Objective
from andrea.training.optimizer import LossScale, Optimizer, clip_logits
from andrea.training.parallel.ranks import Parallel
from andrea.training.records.console import Console


class Update(NamedTuple):
    """Results of one step over all ranks, as tensors on the device; the host has not waited for them."""

    loss: Tensor  # nats per token, 0-dim
    gradient_norm: Tensor  # before clipping, 0-dim
    finite: Tensor  # 0-dim bool; if false, the weights have not changed
    stop_flags: list[Tensor]  # StopRequests.flags, summed, 0-dim each
    heads: HeadStatistics | None  # (L, H), where every step measures them
    size_ratios: Tensor | None  # (matrices,): norm of the change / norm of the weights, if measured

    @property
    def numbers(self) -> list[Tensor]:
        """What the host reads of every step, 0-dim each."""
        return [self.loss, self.gradient_norm, self.finite, *self.stop_flags]


@dataclass
class TrainingStep:
    """One step over all ranks: `run(batch(step), rate)`.

    loss_sum: tokens and targets (B, T), seeds of dropout (B,) -> loss in nats, 0-dim, or `Objective.sums`, and the heads'
    statistics if every step measures them. objective: None: the next token.
    """

    config: RunConfig
    parallel: Parallel
    loss_sum: Callable[..., tuple[Tensor, HeadStatistics | None]]
    optimizer: Optimizer
    scale: LossScale
    loader: Loader
    device: torch.device
    console: Console
    objective: Objective | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.config.train.micro_batch, int), "auto is resolved before the step is made"
        self.ranks = self.parallel.ranks
        self.n_sequence = self.config.sequences_per_step
        self.micro_batch = self.config.train.micro_batch  # halved where memory runs out
        self.clipped_heads = torch.zeros((), device=self.device)  # by QK-clip, since they were last read
        self.prefetched: tuple[int, Batch] | None = None  # a number of steps, and the batch that follows them

    @property
    def runs_ahead(self) -> bool:
        """Whether the host queues work for the device, and goes on while the device computes."""
        return self.device.type != "cpu"

    def batch(self, step: int) -> Batch:
        """This rank's sequences of the step that follows `step` earlier steps."""
        (prefetched_step, batch), self.prefetched = self.prefetched or (None, None), None
        return batch if batch is not None and prefetched_step == step else self.read_batch(step)

    def read_batch(self, step: int) -> Batch:
        if self.objective is not None and (drawn := self.objective.draw(step, self.parallel.model)) is not None:
            return drawn
        n = self.n_sequence
        first, count, most_rows = self.ranks.local_rows(n)
        tokens, targets = self.loader.batch(step * n + first, count)
        seeds = self.loader.sample_seeds(step * n + first, count)
        return Batch(tokens, targets, self.loader.count_targets(step * n, n), seeds, most_rows)

    def prefetch(self, step: int) -> None:
        """On a GPU: read the batch that follows `step` steps now. Lost data are reported when the batch is needed."""
        if self.runs_ahead and not (self.objective and self.objective.draws):
            with contextlib.suppress(DataLost):
                self.prefetched = step, self.read_batch(step)

    def run(self, batch: Batch, rate: float, stop_flags: Callable[[], list[Tensor]], measure_size: bool) -> Update:
        """One step at `rate` times the peak learning rates: forward pass, backward pass, and the optimizer step.

        The weights change only if loss and gradient are finite on all ranks. stop_flags: StopRequests.flags, called as late as
        possible. measure_size: also measure the size of the weights' change.
        """
        nats, heads = self.accumulate(batch)
        nats, *summed_flags = self.ranks.sum(torch.stack([nats, *stop_flags()])).unbind()
        heads = self.ranks.merge_head_statistics(heads) if heads else None
        self.parallel.set_local_gradients()
        self.scale.unscale(self.optimizer.parameters)
        norm = self.optimizer.clip()
        finite = torch.isfinite(norm) & torch.isfinite(nats)
        before = sampled_weights(self.parallel) if measure_size else None
        self.optimizer.step(rate, finite)
        ratios = None
        if before:
            ratios = update_ratios(before, sampled_weights(self.parallel), self.parallel.sum_over_shards)
        self.parallel.zero_gradients()
        self.scale.update(finite)
        if self.config.attention.qk_clip is not None:
            self.clipped_heads += clip_logits(self.parallel, heads.largest_logit, self.config.attention.qk_clip, finite)
        return Update(nats / batch.n_target, norm, finite, summed_flags, heads, ratios)

    def accumulate(self, batch: Batch) -> tuple[Tensor, HeadStatistics | None]:
        """Forward and backward over this rank's micro-batches: their summed loss in nats, and the heads' statistics (L, H).

        Gradients are summed over ranks in the last micro-batch. If memory runs out, the micro-batch is halved and all
        micro-batches are run again.
        """
        while True:
            try:
                nats, heads = torch.zeros((), device=self.device), None
                pieces = list(micro_batches(batch, self.micro_batch))
                for index, piece in enumerate(pieces):
                    with self.parallel.sync_gradients(last=index == len(pieces) - 1):
                        sums, measured = self.loss_sum(*(self.on_device(rows) for rows in piece))
                        micro_nats = sums.flatten()[0]  # what follows it are figures of held-out data
                        # DDP and FSDP divide summed gradients by the number of ranks: multiply by it first.
                        (micro_nats * self.scale.factor * self.ranks.size / batch.n_target).backward()
                    nats += micro_nats.detach()
                    heads = measured.merged(heads) if measured and heads else measured
                return nats, heads
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.parallel.zero_gradients()
                if self.micro_batch == 1 or self.ranks.size > 1:  # other ranks are in the middle of the same step
                    raise UserError(self.remedy()) from None
                self.micro_batch = (self.micro_batch + 1) // 2
            torch.cuda.empty_cache()  # not in the block above: the exception keeps the tensors of its frames alive
            self.console.say(f"out of memory: the step is run again with train.micro_batch={self.micro_batch}")

    def on_device(self, rows: Tensor) -> Tensor:
        """`rows` on the device. From pinned memory the copy is queued; from other memory the host would wait for it."""
        return (rows.pin_memory() if self.device.type == "cuda" else rows).to(self.device, non_blocking=True)

    def remedy(self) -> str:
        """The out-of-memory message if the micro-batch cannot be halved."""
        train, n_token = self.config.train, self.config.model.sequence_length
        remedies = {
            remedy_settings(f"train.micro_batch={self.micro_batch // 2}"): self.micro_batch > 1,
            remedy_settings("train.activation_checkpointing=true"): not train.activation_checkpointing,
            f"train a smaller model, or {remedy_settings(f'model.sequence_length={n_token // 2}')}": n_token > 1,
            "use more ranks with parallel=fsdp": True,
            "raise the memory limit (ulimit -v)": self.device.type == "cpu",
        }
        possible = "; ".join(remedy for remedy, is_possible in remedies.items() if is_possible)
        return f"out of memory with train.micro_batch={self.micro_batch}; remedies: {possible}"

    def take_clipped_heads(self) -> int:
        """The number of heads that QK-clip has scaled since the last call."""
        clipped, self.clipped_heads = int(self.clipped_heads), torch.zeros_like(self.clipped_heads)
        return clipped


def micro_batches(batch: Batch, size: int) -> Iterator[list[Tensor]]:
    """Cut tokens (n, T), targets (n, T), seeds (n,) and weights (n, T), if there are any, into pieces of exactly `size` rows.

    They are enough for batch.most_rows rows. Rows that are added to fill a piece have no targets.
    """
    for start in range(0, batch.most_rows, size):
        piece = []
        weights = () if batch.weights is None else ((batch.weights, 0.0),)
        for whole, filler in ((batch.tokens, 0), (batch.targets, IGNORED_TARGET), (batch.dropout_seeds, -1), *weights):
            part = whole[start : start + size]
            missing = size - len(part)
            piece.append(torch.cat([part, part.new_full((missing, *part.shape[1:]), filler)]) if missing else part)
        yield piece


SAMPLED_WEIGHTS = 1 << 14  # weights of each matrix that are compared, at most


@torch.no_grad()
def sampled_weights(parallel: Parallel) -> list[Tensor]:
    """Sample at most SAMPLED_WEIGHTS evenly spaced weights of each trained matrix.

    LoRA's B is left out: it begins with zeros, which no change can be compared with.
    Returns copies of the samples in this rank's rows, (n,) for each matrix.
    """
    sampled = []
    for name, part in parallel.local_parameters.items():
        shape = parallel.shapes[name]
        if len(shape) == 2 and part.requires_grad and not name.endswith(B):
            stride, before = -(-shape.numel() // SAMPLED_WEIGHTS), parallel.local_rows(name).start * shape[1]
            sampled.append(part.flatten()[-before % stride :: stride].clone())
    return sampled


def update_ratios(before: list[Tensor], after: list[Tensor], sum_over_shards: Callable[[Tensor], Tensor]) -> Tensor:
    """(matrices,): ‖after - before‖ / ‖before‖ of each matrix, on the device, from two results of `sampled_weights`."""
    changed = [(new - old).square().sum() for old, new in zip(before, after, strict=True)]
    norms = sum_over_shards(
        torch.stack([torch.stack(changed), torch.stack([old.square().sum() for old in before])])
    ).sqrt()
    return norms[0] / norms[1].clamp(min=1e-30)


# ------------------------------------------------------------------------------------------------- numbers for the host


class HostCopy:
    """Numbers that the host reads when it needs them.

    On CUDA, the copy into pinned memory is queued behind the work that computes the numbers, and an event behind the copy.
    `read` waits for this event alone. Reading a tensor with `item` or `tolist` would wait for all work that was queued up to
    the moment of reading.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        """numbers: 0-dim each, of any type, on the device or on the host. They are kept in fp32."""
        self.done: torch.cuda.Event | None = None  # None: the numbers are read from the device itself
        device = next((each.device for each in numbers if each.device.type != "cpu"), numbers[0].device)
        self.numbers = torch.stack([each.detach().to(device, torch.float32, non_blocking=True) for each in numbers])
        if copies_asynchronously(device):
            on_device, self.numbers = self.numbers, pinned_like(self.numbers)
            self.numbers.copy_(on_device, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()


def copies_asynchronously(device: torch.device) -> bool:
    return device.type == "cuda"


def pinned_like(tensor: Tensor) -> Tensor:
    """Memory of the host that the device can write to while the host works on."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
