"""Muon for the blocks' matrices, AdamW for the rest; every parameter in exactly one group; updates gated on the device.

A step takes the flag `finite`, a 0-dim bool tensor on the device: where it is false nothing changes, neither weights
nor state, and no host ever waits to find out. Over several ranks each updates the parts of the model that it keeps
(`parallel.local_parameters`, plain tensors); all of it is elementwise except the norm and Muon's orthogonalisation, which
`parallel` does.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from andrea.config import OptimizerConfig
from andrea.model.transfer import Factors, Transfer
from andrea.training.parallel.strategy import Parallel

# The first pattern that matches a parameter's whole name decides its group.
GROUP_OF_NAME = (
    (re.compile(r"embedding\.weight"), "embedding"),
    (re.compile(r"head\.weight"), "head"),
    (re.compile(r"position\.weight"), "head"),
    (re.compile(r"blocks\.\d+\.(attention|mlp)\.\w+\.weight"), "matrix"),
    (re.compile(r".*(norm\.weight|\.bias|\.value_mix)"), "vector"),
    (re.compile(r"blocks\.\d+\.attention\.compatibility\.\w+"), "vector"),  # learned per head: not one matrix
)


def group_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters by group and name; each is in exactly one group, and matrices are matrices."""
    groups: dict[str, dict[str, nn.Parameter]] = {group: {} for group in ("embedding", "head", "matrix", "vector")}
    for name, parameter in parameters.items():
        group = next((group for pattern, group in GROUP_OF_NAME if pattern.fullmatch(name)), None)
        assert group is not None, f"no optimizer group for the parameter {name}: add it to GROUP_OF_NAME"
        assert (parameter.ndim == 1) == (group == "vector") or ".compatibility." in name, (
            f"{name} of shape {tuple(parameter.shape)} is in group {group}"
        )
        groups[group][name] = parameter
    return groups


class Optimizer:
    """AdamW over embeddings, head and vectors, with Muon (or AdamW again) over the blocks' matrices."""

    def __init__(self, parallel: Parallel, config: OptimizerConfig, bf16: bool) -> None:
        self.parallel = parallel
        groups = group_parameters(parallel.local_parameters)
        transfer = Transfer.of(parallel.model.config, config)
        everywhere = config.kind == "adamw"
        peaks = {
            "embedding": config.embedding_learning_rate or config.learning_rate,
            "head": config.learning_rate,
            "vector": config.learning_rate,
            "matrix": config.matrix_learning_rate or config.learning_rate,
        }
        decays = {
            "matrix": config.weight_decay,
            "embedding": config.weight_decay if everywhere else 0.0,
            "head": config.weight_decay if everywhere else 0.0,
            "vector": 0.0,
        }
        self.names = {parameter: name for name, parameter in parallel.local_parameters.items()}
        alike: dict[tuple[str, Factors], list[nn.Parameter]] = defaultdict(list)  # those that share all settings
        for group, members in groups.items():
            if everywhere or group != "matrix":
                for name, parameter in members.items():
                    alike[group, transfer.factors(name)].append(parameter)
        self.adamw = torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "lr": peaks[group] * factors.adamw_rate,
                    "peak": peaks[group] * factors.adamw_rate,
                    "weight_decay": decays[group] / factors.adamw_rate if decays[group] else 0.0,
                    "eps": config.epsilon * factors.epsilon,
                }
                for (group, factors), parameters in alike.items()
            ],
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        self.muon = None
        if not everywhere and groups["matrix"]:
            factors = {name: transfer.factors(name).muon_rate for name in groups["matrix"]}
            momentum = config.momentum or 0.0
            self.muon = Muon(groups["matrix"], factors, peaks["matrix"], momentum, config.weight_decay, bf16, parallel)
        self.clip_norm = config.clip_norm

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.names)

    def clip(self) -> Tensor:
        """Scale all gradients so that their global norm is at most clip_norm; returns the norm before, 0-dim."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = self.parallel.norm(nn.utils.get_total_norm(gradients))
        if self.clip_norm is not None:
            torch._foreach_mul_(gradients, torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))
        return norm

    def step(self, rate: float, finite: Tensor) -> None:
        """One update at `rate` times the peak rates, or none where the 0-dim flag `finite` is false."""
        finite = finite.to(self.parameters[0].device)  # elsewhere only where the parts stay in the CPU's memory
        for group in self.adamw.param_groups:
            group["lr"] = group["peak"] * rate
        # torch's fused kernels read this attribute: where it is 1 they leave weights, moments and step counts alone
        self.adamw.found_inf = (~finite).to(torch.float32)
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(rate, finite)

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as `parameter/quantity`."""
        tensors = {
            f"{self.names[parameter]}/{quantity}": value
            for parameter, quantities in self.adamw.state.items()
            for quantity, value in quantities.items()
        }
        if self.muon is not None:
            tensors |= {f"{name}/momentum": buffer for name, buffer in self.muon.momentum_buffers().items()}
        return tensors

    def blank_state_tensors(self) -> dict[str, Tensor]:
        """Zeros, on the CPU, in the place of each tensor of the state of a run that has begun."""
        blank = {}
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                name = self.names[parameter]
                zeros = {"step": torch.zeros(())}
                zeros |= {key: torch.zeros_like(parameter.detach(), device="cpu") for key in ("exp_avg", "exp_avg_sq")}
                blank |= {f"{name}/{quantity}": value for quantity, value in zeros.items()}
        if self.muon is not None:
            for name, buffer in self.muon.momentum_buffers().items():
                blank[f"{name}/momentum"] = torch.zeros_like(buffer, device="cpu")
        return blank

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`; every parameter's state must be there, and nothing else."""
        expected = dict(tensors)
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                name = self.names[parameter]
                self.adamw.state[parameter] = {
                    "step": expected.pop(f"{name}/step").to(parameter.device),
                    "exp_avg": expected.pop(f"{name}/exp_avg").to(parameter.device),
                    "exp_avg_sq": expected.pop(f"{name}/exp_avg_sq").to(parameter.device),
                }
        if self.muon is not None:
            for name, buffer in self.muon.momentum_buffers().items():
                buffer.copy_(expected.pop(f"{name}/momentum"))
        assert not expected, f"optimizer state that no parameter owns: {sorted(expected)[:3]}"


class Muon:
    """Momentum, orthogonalised by Newton–Schulz (Jordan et al. 2024, "Muon"), matrices of one shape at a time.

    factors: what `peak` is multiplied by, by name. Weight decay takes its share of the peak itself.
    """

    def __init__(
        self,
        matrices: dict[str, nn.Parameter],
        factors: dict[str, float],
        peak: float,
        momentum: float,
        weight_decay: float,
        bf16: bool,
        parallel: Parallel,
    ) -> None:
        self.peak, self.momentum, self.weight_decay = peak, momentum, weight_decay
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.parallel = parallel
        by_shape: dict[tuple, list[str]] = defaultdict(list)
        for name in matrices:
            by_shape[(*parallel.shapes[name], factors[name])].append(name)
        self.stacks = []  # (names, matrices, momentum (n, rows kept here, columns), rows, columns, factor of the rate)
        for (rows, columns, factor), names in by_shape.items():
            kept = [matrices[name] for name in names]
            momentum_stack = torch.zeros(len(names), *kept[0].shape, device=kept[0].device)
            self.stacks.append((names, kept, momentum_stack, rows, columns, factor))

    @torch.no_grad()
    def step(self, rate: float, finite: Tensor) -> None:
        kept = torch.where(finite, 1 - self.peak * rate * self.weight_decay, 1.0)
        for _, matrices, momentum, rows, columns, factor in self.stacks:
            size = max(1.0, rows / columns) ** 0.5 * self.peak * rate * factor
            change = torch.where(finite, self.update(matrices, momentum, rows, finite).mul_(-size), 0.0)
            torch._foreach_mul_(matrices, kept)
            torch._foreach_add_(matrices, change.unbind())
            del change  # which need not outlive its stack

    def update(self, matrices: list[nn.Parameter], momentum: Tensor, rows: int, finite: Tensor) -> Tensor:
        """The momentum goes on; what it is now, orthogonalised: (n, rows kept here, columns), fp32."""
        gradient = torch.stack([matrix.grad for matrix in matrices])
        momentum.copy_(torch.where(finite, momentum.lerp(gradient, 1 - self.momentum), momentum))
        nesterov = gradient.lerp_(momentum, self.momentum)
        return self.parallel.orthogonalised(nesterov.to(self.dtype), rows, orthogonalise).to(torch.float32)

    def momentum_buffers(self) -> dict[str, Tensor]:
        """Momentum by parameter name, as views of the stacks."""
        return {name: buffer for names, _, stack, *_ in self.stacks for name, buffer in zip(names, stack, strict=True)}


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices to (n, rows, columns), roughly: singular values end in about 0.7..1.2.

    Quintic Newton–Schulz with the coefficients of Jordan et al. (2024), which trade exactness for slope at zero.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, beta=1.0, alpha=c) @ x
    return x if wide else x.mT
