"""A running average of the weights, which evaluations, samples and the loaded model use in place of the newest weights.

Polyak and Juditsky (1992) average all steps; here older steps count less, as an exponential moving average with the bias
correction of Adam (Kingma and Ba 2015, arXiv 1412.6980, section 3).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from andrea.checkpoint.folder import AVERAGE
from andrea.training.parallel.strategy import Parallel


class WeightAverage:
    """The average of this rank's rows of all parameters. A step counts half as much as one `half_life` steps later."""

    def __init__(self, parallel: Parallel, half_life: float) -> None:
        self.parallel, self.log_decay = parallel, -math.log(2) / half_life
        self.averages = {
            name: torch.zeros_like(part, requires_grad=False) for name, part in parallel.local_parameters.items()
        }

    @torch.no_grad()
    def update(self, n_step: Tensor, finite: Tensor) -> None:
        """Add the weights after `n_step` steps, 0-dim, to the average, unless the 0-dim flag `finite` is false."""
        share = math.expm1(self.log_decay) / torch.expm1(self.log_decay * n_step)  # of the newest weights; 1 at first
        share = torch.where(finite, share, 0.0)
        for name, part in self.parallel.local_parameters.items():
            self.averages[name].lerp_(part.detach(), share)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Within the context, the model has the average in place of its weights. Every rank must enter it."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        for name, part in self.parallel.local_parameters.items():
            weights = part.clone()
            part.copy_(self.averages[name])
            self.averages[name].copy_(weights)
        self.parallel.drop_gathered()

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages, named `parameter/average`."""
        return {f"{name}/{AVERAGE}": average for name, average in self.averages.items()}
