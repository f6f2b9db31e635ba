"""Muon for the matrices of the blocks, AdamW for all other parameters; each parameter is in exactly one group.

A step takes `finite`, a 0-dim bool tensor on the device. If it is false, neither weights nor state change; the host
never waits for its value. Each rank updates its own rows of the parameters (`parallel.local_parameters`, plain
tensors). Only the gradient norm and Muon's orthogonalisation need other ranks, through `parallel`; all other operations
are elementwise.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from andrea.checkpoint.folder import AVERAGE
from andrea.config import OptimizerConfig
from andrea.model.transfer import Factors, Transfer
from andrea.training.optimizer.average import WeightAverage
from andrea.training.optimizer.muon import Muon
from andrea.training.parallel.strategy import Parallel

BETAS = (0.9, 0.95)  # of AdamW's running means: those of GPT-3 and Llama
# The first pattern that matches a parameter's whole name decides its group.
GROUP_OF_NAME = (
    (re.compile(r"embedding\.weight"), "embedding"),
    (re.compile(r".*\.value_embedding\.table\.weight"), "embedding"),
    (re.compile(r".*\.value_embedding\.projection\.weight"), "matrix"),
    (re.compile(r"head\.weight"), "head"),
    (re.compile(r"bigram_embedding\.table\.weight"), "head"),  # three times this rate is worse: bench/README.md
    (re.compile(r"position\.weight"), "head"),
    # Also the head gates: andrea-nano at 280 steps ends at 1.358 and 1.366 bits per byte (two seeds), with AdamW for the
    # gates at 1.363 and 1.372 (elementwise gates: 1.380 and 1.396). At 60 steps AdamW is still ahead, 1.931 to 1.949.
    (re.compile(r"blocks\.\d+\.attention\.\w+\.weight"), "matrix"),
    (re.compile(r".*(norm\.weight|\.bias|\.value_mix|\.value_embedding\.mix|\.exclusive_share|\.sink)"), "vector"),
    (re.compile(r"blocks\.\d+\.attention\.(query|key)_norm"), "vector"),  # learned weights of QK-norm
    (re.compile(r"blocks\.\d+\.attention\.taps"), "taps"),  # one row per channel: not a matrix for Muon
    (re.compile(r"blocks\.\d+\.attention\.compatibility\..+"), "vector"),  # one entry per head: not a matrix for Muon
)
OF_MLP = re.compile(r"blocks\.\d+\.mlp\..+")  # a user's own MLP may use any names: its 2-dim parameters are matrices


def group_of(name: str, parameter: nn.Parameter) -> str | None:
    if OF_MLP.fullmatch(name):
        return "matrix" if parameter.ndim == 2 else "vector"
    return next((group for pattern, group in GROUP_OF_NAME if pattern.fullmatch(name)), None)


def group_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters by group and name. Each parameter is in exactly one group.

    1-dim parameters are in "vector", matrices in the other groups. All parameters of a compatibility function are in
    "vector" too, and so are the parameters of a user's own MLP that are not 2-dim.
    """
    groups: dict[str, dict[str, nn.Parameter]] = {
        group: {} for group in ("embedding", "head", "matrix", "taps", "vector")
    }
    for name, parameter in parameters.items():
        group = group_of(name, parameter)
        assert group is not None, f"no optimizer group for the parameter {name}: add it to GROUP_OF_NAME"
        other = group == "taps" or ".compatibility." in name or OF_MLP.fullmatch(name)
        assert (parameter.ndim == 1) == (group == "vector") or other, (
            f"{name} of shape {tuple(parameter.shape)} is in group {group}"
        )
        groups[group][name] = parameter
    return groups


def saved_shapes(parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the optimizer's state in a checkpoint, by `parameter/quantity`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for group, members in group_parameters(parameters).items():
        for name, parameter in members.items():
            if group == "matrix" and config.kind != "adamw":
                shapes[f"{name}/momentum"] = tuple(parameter.shape)
            else:
                shapes |= {f"{name}/{each}": tuple(parameter.shape) for each in ("exp_avg", "exp_avg_sq")}
                shapes[f"{name}/step"] = ()
            if config.average_half_life is not None:
                shapes[f"{name}/{AVERAGE}"] = tuple(parameter.shape)
    return shapes


class Optimizer:
    """AdamW for embedding, head and vectors; Muon or AdamW for the matrices of the blocks."""

    def __init__(self, parallel: Parallel, config: OptimizerConfig, bf16: bool) -> None:
        """bf16: Muon orthogonalises in bf16."""
        self.parallel, self.config = parallel, config
        self.clip_norm = config.clip_norm
        self.names = {parameter: name for name, parameter in parallel.local_parameters.items()}
        groups = group_parameters(parallel.local_parameters)
        transfer = Transfer.of(parallel.model.config, config)
        with_muon = config.kind != "adamw" and groups["matrix"]
        self.muon = None
        if with_muon:
            matrices = groups.pop("matrix")
            rate_factors = {name: transfer.factors(name).muon_rate for name in matrices}
            self.muon = Muon(matrices, rate_factors, config, bf16, parallel)
        self.adamw = torch.optim.AdamW(adamw_groups(groups, transfer, config), betas=BETAS, fused=True)
        self.average = WeightAverage(parallel, config.average_half_life) if config.average_half_life else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.names)

    def clip(self) -> Tensor:
        """Scale all gradients so that their global norm is at most clip_norm. Returns the unclipped norm, 0-dim."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = self.parallel.norm_over_shards(nn.utils.get_total_norm(gradients))
        if self.clip_norm is not None:
            torch._foreach_mul_(gradients, torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))
        return norm

    def step(self, rate: float, finite: Tensor) -> None:
        """Update at `rate` times the peak learning rates; change nothing if the 0-dim flag `finite` is false."""
        finite = finite.to(self.parameters[0].device)  # they differ only if parameters are offloaded to the CPU
        for group in self.adamw.param_groups:
            group["lr"] = group["peak"] * rate
        # If this attribute is 1, torch's fused kernels change neither weights, moments nor step counts.
        self.adamw.found_inf = (~finite).to(torch.float32)
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(rate, finite)
        if self.average is not None:
            self.average.update(self.adamw.state[self.adamw.param_groups[0]["params"][0]]["step"], finite)

    def averaged_model(self) -> AbstractContextManager[None]:
        """Within the context, the model has the running average in place of its weights, if there is one."""
        return self.average.in_model() if self.average is not None else contextlib.nullcontext()

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, named `parameter/quantity`."""
        tensors = {
            f"{self.names[parameter]}/{quantity}": value
            for parameter, quantities in self.adamw.state.items()
            for quantity, value in quantities.items()
        }
        return tensors | self.kept_tensors()

    def kept_tensors(self) -> dict[str, Tensor]:
        """The part of `state_tensors` that exists from the start: Muon's state and the average of the weights."""
        return {
            name: state for part in (self.muon, self.average) if part for name, state in part.state_tensors().items()
        }

    def state_shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of `state_tensors` after the first step."""
        shapes = {}
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                name = self.names[parameter]
                shapes |= {f"{name}/step": torch.Size(), f"{name}/exp_avg": parameter.shape}
                shapes[f"{name}/exp_avg_sq"] = parameter.shape
        return shapes | {name: state.shape for name, state in self.kept_tensors().items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state_tensors`, which must hold the state of every parameter and nothing else."""
        remaining = dict(tensors)
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                name = self.names[parameter]
                self.adamw.state[parameter] = {
                    "step": remaining.pop(f"{name}/step").to(parameter.device),
                    "exp_avg": remaining.pop(f"{name}/exp_avg").to(parameter.device),
                    "exp_avg_sq": remaining.pop(f"{name}/exp_avg_sq").to(parameter.device),
                }
        for name, state in self.kept_tensors().items():
            state.copy_(remaining.pop(name))
        assert not remaining, f"optimizer state that no parameter owns: {sorted(remaining)[:3]}"


def adamw_groups(
    groups: dict[str, dict[str, nn.Parameter]], transfer: Transfer, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """The parameter groups of torch's AdamW: the parameters of a group share peak rate, weight decay and epsilon.

    Weight decay applies to matrices. It also applies to embedding and head if AdamW is the only optimizer.
    """
    peak_rates = {
        "embedding": config.embedding_learning_rate or config.learning_rate,
        "head": config.learning_rate,
        "vector": config.learning_rate,
        "taps": config.convolution_learning_rate or config.learning_rate,
        "matrix": config.matrix_learning_rate or config.learning_rate,
    }
    decay_elsewhere = config.decay if config.kind == "adamw" else 0.0
    decays = {
        "matrix": config.decay,
        "embedding": decay_elsewhere,
        "head": decay_elsewhere,
        "vector": 0.0,
        "taps": 0.0,
    }
    with_same_settings: dict[tuple[str, Factors], list[nn.Parameter]] = defaultdict(list)
    for group, members in groups.items():
        for name, parameter in members.items():
            with_same_settings[group, transfer.factors(name)].append(parameter)
    return [
        {
            "params": parameters,
            "lr": peak_rates[group] * factors.adamw_rate,
            "peak": peak_rates[group] * factors.adamw_rate,
            "weight_decay": decays[group] / factors.adamw_rate if decays[group] else 0.0,  # torch multiplies it by lr
            "eps": config.epsilon * factors.epsilon,
        }
        for (group, factors), parameters in with_same_settings.items()
    ]
