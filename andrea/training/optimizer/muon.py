"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): orthogonalised momentum.

Its variant MuonEq-R, the default, makes the rows of the momentum equally long first.

n matrices of one shape, with R rows and C columns each. Each rank updates its own rows; `Parallel` assembles whole
matrices for the orthogonalisation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andrea.config import OptimizerConfig
from andrea.training.parallel.strategy import Parallel

MOMENTUM = 0.95  # decay of the running mean of the gradient (Nesterov), as of Jordan et al. (2024)
SMALLEST_NORM = 1e-7  # added to norms, which may be 0
# Each step turns a singular value x, at most 1, into a x + b x³ + c x⁵. Chosen by Jordan et al. (2024) for fast growth of small
# singular values, not for convergence to exactly 1.
A, B, C = 3.4445, -4.7750, 2.0315
NEWTON_SCHULZ_STEPS = 5


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
        config: OptimizerConfig,
        bf16: bool,
        parallel: Parallel,
    ) -> None:
        """rate_factors: parameter name -> factor on the peak rate. Weight decay uses the peak rate without the factor.

        bf16: orthogonalise in bf16, else in fp32.
        """
        self.peak_rate = config.matrix_learning_rate or config.learning_rate
        self.config = config
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
        decay = self.peak_rate * rate * self.config.decay
        for stack in self.stacks:
            direction = self.direction(stack, finite)
            torch._foreach_mul_(stack.matrices, torch.where(finite, 1 - decay, 1.0))
            step_size = max(1.0, stack.n_row / stack.n_column) ** 0.5 * self.peak_rate * rate * stack.rate_factor
            change = torch.where(finite, direction.mul_(-step_size), 0.0)
            torch._foreach_add_(stack.matrices, change.unbind())
            del direction, change  # free their memory before the next stack

    def direction(self, stack: Stack, finite: Tensor) -> Tensor:
        """Update the momentum. Returns its Nesterov form, orthogonalised, (n, rows on this rank, C) fp32.

        MuonEq-R (arXiv 2603.28254) divides each row by its norm before the orthogonalisation.
        """
        gradient = torch.stack([matrix.grad for matrix in stack.matrices])
        momentum = stack.momentum
        momentum.copy_(torch.where(finite, momentum.lerp(gradient, 1 - MOMENTUM), momentum))
        nesterov = gradient.lerp_(momentum, MOMENTUM)
        if self.config.rows == "equal":
            nesterov /= nesterov.norm(dim=-1, keepdim=True) + SMALLEST_NORM
        full = self.parallel.apply_to_full_matrices(nesterov.to(self.dtype), stack.n_row, orthogonalise)
        return full.to(torch.float32)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state, named `parameter/momentum`, as views into the stacks."""
        return {
            f"{name}/momentum": momentum
            for stack in self.stacks
            for name, momentum in zip(stack.names, stack.momentum, strict=True)
        }


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrices to (n, R, C), by Newton–Schulz iteration.

    Their singular values are about 0.7 to 1.2.
    """
    is_wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if is_wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        # A X + (B X Xᵀ + C (X Xᵀ)²) X, each sum together with its product.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x if is_wide else x.mT
