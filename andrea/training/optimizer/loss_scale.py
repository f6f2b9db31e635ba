"""The loss scale that keeps small fp16 gradients from vanishing (Micikevicius et al. 2018, section 3.2).

Unlike torch's GradScaler, it stays on the device: the host does not wait for an overflow flag before each update.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROWTH_INTERVAL = 2000  # finite steps until the scale doubles
SMALLEST_SCALE = 1.0  # an overflow at a smaller scale is not caused by fp16's range: the run has failed


class LossScale:
    """A power of two that multiplies the loss in fp16. In other precisions it is inactive and always 1."""

    def __init__(self, device: torch.device, active: bool) -> None:
        self.active = active
        self.factor = torch.full((), 2.0**16 if active else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device)

    def unscale(self, parameters: list[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.active:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_div_(gradients, self.factor.to(gradients[0].device))

    def update(self, finite: Tensor) -> None:
        """Halve the scale after a step that overflowed; double it after GROWTH_INTERVAL finite steps in a row."""
        if self.active:
            self.finite_steps = torch.where(finite, self.finite_steps + 1, 0.0)
            grow = self.finite_steps >= GROWTH_INTERVAL
            self.factor = torch.where(finite, torch.where(grow, self.factor * 2, self.factor), self.factor / 2)
            self.finite_steps = torch.where(grow, 0.0, self.finite_steps)

    def may_back_off(self) -> bool:
        """Whether an overflow may be due to the scale, so that a smaller scale may avoid it. Waits for the device."""
        return self.active and float(self.factor) >= SMALLEST_SCALE

    def state(self) -> list[float]:
        """[scale, finite steps since it last changed], for the checkpoint."""
        return [float(self.factor), float(self.finite_steps)]

    def load_state(self, state: list[float]) -> None:
        self.factor.fill_(state[0])
        self.finite_steps.fill_(state[1])
