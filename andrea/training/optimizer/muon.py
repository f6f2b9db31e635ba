"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): orthogonalised momentum.

n matrices of one shape, with R rows and C columns each. Each rank updates its own rows; `Parallel` assembles whole
matrices for the orthogonalisation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andrea.training.parallel.strategy import Parallel


@dataclass
class Stack:
    """Matrices that are updated together: they have the same shape and the same learning-rate factor."""

    names: list[str]
    matrices: list[nn.Parameter]  # n matrices of (rows on this rank, C)
    momentum: Tensor  # (n, rows on this rank, C)
    n_row: int  # R
    n_column: int  # C
    rate_factor: float


class Muon:
    """Momentum, orthogonalised by Newton–Schulz iteration, for one `Stack` of matrices at a time."""

    def __init__(
        self,
        matrices: dict[str, nn.Parameter],
        rate_factors: dict[str, float],
        peak_rate: float,
        momentum: float,
        weight_decay: float,
        bf16: bool,
        parallel: Parallel,
    ) -> None:
        """rate_factors: parameter name -> factor on peak_rate. Weight decay uses peak_rate without the factor.

        bf16: orthogonalise in bf16, else in fp32.
        """
        self.peak_rate, self.momentum, self.weight_decay = peak_rate, momentum, weight_decay
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.parallel = parallel
        names_by_shape: dict[tuple[int, int, float], list[str]] = defaultdict(list)
        for name in matrices:
            n_row, n_column = parallel.shapes[name]
            names_by_shape[n_row, n_column, rate_factors[name]].append(name)
        self.stacks = []
        for (n_row, n_column, rate_factor), names in names_by_shape.items():
            local = [matrices[name] for name in names]
            buffer = torch.zeros(len(names), *local[0].shape, device=local[0].device)
            self.stacks.append(Stack(names, local, buffer, n_row, n_column, rate_factor))

    @torch.no_grad()
    def step(self, rate: float, finite: Tensor) -> None:
        """W ← (1 - rate · peak · decay) W - rate · peak · factor · sqrt(max(1, R/C)) · orthogonalise(momentum).

        rate: the learning rate as a fraction of its peak. Nothing changes where the 0-dim flag `finite` is false.
        """
        decay_factor = torch.where(finite, 1 - self.peak_rate * rate * self.weight_decay, 1.0)
        for stack in self.stacks:
            step_size = max(1.0, stack.n_row / stack.n_column) ** 0.5 * self.peak_rate * rate * stack.rate_factor
            change = torch.where(finite, self.direction(stack, finite).mul_(-step_size), 0.0)
            torch._foreach_mul_(stack.matrices, decay_factor)
            torch._foreach_add_(stack.matrices, change.unbind())
            del change  # free its memory before the next stack

    def direction(self, stack: Stack, finite: Tensor) -> Tensor:
        """Update the momentum. Returns its Nesterov form, orthogonalised, (n, rows on this rank, C) fp32."""
        gradient = torch.stack([matrix.grad for matrix in stack.matrices])
        momentum = stack.momentum
        momentum.copy_(torch.where(finite, momentum.lerp(gradient, 1 - self.momentum), momentum))
        nesterov = gradient.lerp_(momentum, self.momentum).to(self.dtype)
        return self.parallel.apply_to_full_matrices(nesterov, stack.n_row, orthogonalise).to(torch.float32)

    def momentum_buffers(self) -> dict[str, Tensor]:
        """Momentum by parameter name, as views into the stacks."""
        return {name: buffer for stack in self.stacks for name, buffer in zip(stack.names, stack.momentum, strict=True)}


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrices to (n, R, C): singular values of about 0.7 to 1.2.

    Quintic Newton–Schulz iteration with the coefficients of Jordan et al. (2024). They are chosen for fast growth of
    small singular values, not for convergence to exactly 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if is_wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, beta=1.0, alpha=c) @ x
    return x if is_wide else x.mT
