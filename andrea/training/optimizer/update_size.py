"""The size of an optimizer step: for each matrix, the norm of the update divided by the norm of the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from andrea.training.parallel.strategy import Parallel

SAMPLED_WEIGHTS = 1 << 14  # weights of each matrix that are compared, at most


@torch.no_grad()
def sampled_weights(parallel: Parallel) -> list[Tensor]:
    """Sample at most SAMPLED_WEIGHTS evenly spaced weights of each matrix.

    Returns copies of the samples in this rank's rows, (n,) for each matrix.
    """
    sampled = []
    for name, part in parallel.local_parameters.items():
        shape = parallel.shapes[name]
        if len(shape) == 2:
            stride, before = -(-shape.numel() // SAMPLED_WEIGHTS), parallel.local_rows(name).start * shape[1]
            sampled.append(part.flatten()[-before % stride :: stride].clone())
    return sampled


def update_ratios(before: list[Tensor], after: list[Tensor], sum_over_shards: Callable[[Tensor], Tensor]) -> Tensor:
    """(matrices,): ‖after - before‖ / ‖before‖ of each matrix, on the device.

    before, after: results of `sampled_weights` before and after the optimizer step.
    """
    changed = [(new - old).square().sum() for old, new in zip(before, after, strict=True)]
    norms = sum_over_shards(
        torch.stack([torch.stack(changed), torch.stack([old.square().sum() for old in before])])
    ).sqrt()
    return norms[0] / norms[1].clamp(min=1e-30)
