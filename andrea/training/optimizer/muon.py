"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): orthogonalised momentum.

Its variants are NorMuon, MuonEq-R, the coefficients of Polar Express, and cautious weight decay.

n matrices of one shape, with R rows and C columns each. Each rank updates its own rows; `Parallel` assembles whole
matrices for the orthogonalisation.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andrea.config import OptimizerConfig
from andrea.training.optimizer.schedule import weight_decay_at
from andrea.training.parallel.strategy import Parallel

ROW_DECAY = 0.95  # of NorMuon's mean square, per step
SMALLEST_NORM = 1e-7  # added to norms, which may be 0
# (a, b, c) of each step a x + b x³ + c x⁵ of a singular value x that is at most 1.
COEFFICIENTS = {
    # Jordan et al. (2024): for fast growth of small singular values, not for convergence to exactly 1
    "quintic": 5 * ((3.4445, -4.7750, 2.0315),),
    # Amsel et al. 2025, arXiv 2505.16932, list of coefficients: each step is the best one after those before it
    "polar_express": (
        (8.287212018, -23.59588652, 17.30038731),
        (4.107059112, -2.947849917, 0.5448431083),
        (3.948690853, -2.908902116, 0.5518191394),
        (3.318419657, -2.488488024, 0.5100489401),
        (2.300652020, -1.668903985, 0.4188073120),
    ),
}
# The largest singular value may exceed 1 by rounding, in bf16. Polar Express would let it grow; it is divided by this
# number before each step.
HEADROOM = {"quintic": 1.0, "polar_express": 1.01}


@dataclass
class Stack:
    """Matrices that are updated together: they have the same shape and the same learning-rate factor."""

    names: list[str]
    matrices: list[nn.Parameter]  # n matrices of (rows on this rank, C)
    momentum: Tensor  # (n, rows on this rank, C)
    row_mean_square: Tensor | None  # (n, rows on this rank): of the orthogonalised momentum; for NorMuon
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
        self.peak_rate, self.momentum = config.matrix_learning_rate or config.learning_rate, config.momentum or 0.0
        self.config, self.rows = config, config.rows
        self.orthogonalise = functools.partial(orthogonalise, coefficients=config.orthogonalisation)
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
            mean_square = buffer.new_zeros(buffer.shape[:2]) if self.rows == "normuon" else None
            self.stacks.append(Stack(names, local, buffer, mean_square, n_row, n_column, rate_factor))

    @torch.no_grad()
    def step(self, rate: float, finite: Tensor) -> None:
        """W ← (1 - rate · peak · decay) W - rate · peak · factor · sqrt(max(1, R/C)) · orthogonalise(momentum).

        rate: the learning rate as a fraction of its peak. Nothing changes where the 0-dim flag `finite` is false.
        Cautious weight decay (Chen et al. 2025, arXiv 2510.12402) decays only the weights that the update shrinks too.
        """
        decay = self.peak_rate * weight_decay_at(rate, self.config) * self.config.decay
        for stack in self.stacks:
            direction = self.direction(stack, finite)
            if self.config.cautious_decay:
                weights = torch.stack(stack.matrices)
                decayed = weights.mul_((weights * direction > 0) & finite).mul_(decay)
                torch._foreach_sub_(stack.matrices, decayed.unbind())
                del weights, decayed
            else:
                torch._foreach_mul_(stack.matrices, torch.where(finite, 1 - decay, 1.0))
            step_size = max(1.0, stack.n_row / stack.n_column) ** 0.5 * self.peak_rate * rate * stack.rate_factor
            change = torch.where(finite, direction.mul_(-step_size), 0.0)
            torch._foreach_add_(stack.matrices, change.unbind())
            del direction, change  # free their memory before the next stack

    def direction(self, stack: Stack, finite: Tensor) -> Tensor:
        """Update the momentum. Returns its Nesterov form, orthogonalised, (n, rows on this rank, C) fp32.

        MuonEq-R (arXiv 2603.28254) divides each row by its norm before the orthogonalisation, NorMuon after it.
        """
        gradient = torch.stack([matrix.grad for matrix in stack.matrices])
        momentum = stack.momentum
        momentum.copy_(torch.where(finite, momentum.lerp(gradient, 1 - self.momentum), momentum))
        nesterov = gradient.lerp_(momentum, self.momentum)
        if self.rows == "equal":
            nesterov /= nesterov.norm(dim=-1, keepdim=True) + SMALLEST_NORM
        full = self.parallel.apply_to_full_matrices(nesterov.to(self.dtype), stack.n_row, self.orthogonalise)
        direction = full.to(torch.float32)
        return direction if stack.row_mean_square is None else self.with_similar_rows(direction, stack, finite)

    def with_similar_rows(self, direction: Tensor, stack: Stack, finite: Tensor) -> Tensor:
        """NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1): each row divided by its root mean square over time.

        direction and result: (n, rows on this rank, C). Unlike in the paper, each matrix keeps its norm, so that the rate
        has the same meaning as in Muon.
        """
        mean_square, newest = stack.row_mean_square, direction.square().mean(-1)  # (n, rows on this rank)
        mean_square.copy_(torch.where(finite, mean_square.lerp(newest, 1 - ROW_DECAY), mean_square))
        scale = 1 / (mean_square.sqrt() + SMALLEST_NORM)
        before, after = self.parallel.sum_over_shards(
            torch.stack([newest.sum(-1), (newest * scale**2).sum(-1)])
        )  # (n,)
        return direction * (scale * (before / after.clamp(min=1e-30)).sqrt()[:, None])[..., None]

    def state_tensors(self) -> dict[str, Tensor]:
        """The state, named `parameter/quantity`, as views into the stacks."""
        return {
            f"{name}/{quantity}": each
            for stack in self.stacks
            for quantity, state in (("momentum", stack.momentum), ("row_mean_square", stack.row_mean_square))
            if state is not None
            for name, each in zip(stack.names, state, strict=True)
        }


def orthogonalise(matrices: Tensor, coefficients: str = "quintic") -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrices to (n, R, C), by Newton–Schulz iteration.

    coefficients: "quintic" brings the singular values to about 0.7 to 1.2, "polar_express" to about 0.9 to 1.1.
    """
    headroom = HEADROOM[coefficients]
    is_wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if is_wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)
    for a, b, c in COEFFICIENTS[coefficients]:
        a, b, c = a / headroom, b / headroom**3, c / headroom**5
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, beta=1.0, alpha=c) @ x
    return x if is_wide else x.mT
