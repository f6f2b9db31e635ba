"""Muon for the matrices of the blocks, AdamW for all other parameters; gradient clipping, the learning rate's
schedule, fp16's loss scale, QK-clip.

Each parameter is in exactly one group. A step takes `finite`, a 0-dim bool tensor on the device. If it is false, neither
weights nor state change; the host never waits for its value. Each rank updates its own rows of the parameters
(`parallel.local_parameters`, plain tensors). Only the gradient norm and Muon's orthogonalisation need other ranks, through
`parallel`; all other operations are elementwise.
"""

import contextlib
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from andrea.checkpoint.folder import AVERAGE
from andrea.config import OptimizerConfig, UserError
from andrea.model.lora import is_factor
from andrea.model.transfer import Factors, Transfer
from andrea.training.parallel.ranks import Parallel

# ----------------------------------------------------------------------------------------------------------------- muon
# Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): orthogonalised momentum. Its variant
# MuonEq-R, the default, makes the rows of the momentum equally long first. n matrices of one shape, with R rows and C columns
# each. Each rank updates its own rows; `Parallel` assembles whole matrices for the orthogonalisation.

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
        """rate_factors: parameter name -> factor on the peak rate, not on weight decay. bf16: orthogonalise in bf16."""
        self.config, self.parallel = config, parallel
        self.peak_rate = config.matrix_learning_rate or config.learning_rate
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.weight_decay, self.equal_rows = config.decay, config.rows == "equal"
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
        decay = self.peak_rate * rate * self.weight_decay
        for stack in self.stacks:
            direction = self.direction(stack, finite)
            torch._foreach_mul_(stack.matrices, torch.where(finite, 1 - decay, 1.0))
            step_size = max(1.0, stack.n_row / stack.n_column) ** 0.5 * self.peak_rate * rate * stack.rate_factor
            change = torch.where(finite, direction.mul_(-step_size), 0.0)
            torch._foreach_add_(stack.matrices, change.unbind())
            del direction, change  # free their memory before the next stack

    def direction(self, stack: Stack, finite: Tensor) -> Tensor:
        """Update the momentum. Returns its Nesterov form (MuonEq-R, arXiv 2603.28254), orthogonalised, shaped alike, fp32."""
        gradient = torch.stack([matrix.grad for matrix in stack.matrices])
        momentum = stack.momentum
        momentum.copy_(torch.where(finite, momentum.lerp(gradient, 1 - MOMENTUM), momentum))
        nesterov = gradient.lerp_(momentum, MOMENTUM)
        if self.equal_rows:
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
    """Approximately the nearest (semi-)orthogonal matrices to (n, R, C), by Newton–Schulz: singular values of 0.7 to 1.2."""
    is_wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if is_wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        # A X + (B X Xᵀ + C (X Xᵀ)²) X, each sum together with its product.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x if is_wide else x.mT


# -------------------------------------------------------------------------------------------------------------- average
# A running average of the weights, which evaluations, samples and the loaded model use in place of the newest weights.
#
# Polyak and Juditsky (1992) average all steps; here older steps count less, as an exponential moving average with the bias
# correction of Adam (Kingma and Ba 2015, arXiv 1412.6980, section 3).


class WeightAverage:
    """The average of this rank's rows of all trained parameters. A step counts half as much as one `half_life` steps later."""

    def __init__(self, parallel: Parallel, half_life: float) -> None:
        self.parallel, self.log_decay = parallel, -math.log(2) / half_life
        self.parts = trained(parallel.local_parameters)
        self.averages = {name: torch.zeros_like(part, requires_grad=False) for name, part in self.parts.items()}

    @torch.no_grad()
    def update(self, n_step: Tensor, finite: Tensor) -> None:
        """Add the weights after `n_step` steps, 0-dim, to the average, unless the 0-dim flag `finite` is false."""
        share = math.expm1(self.log_decay) / torch.expm1(self.log_decay * n_step)  # of the newest weights; 1 at first
        share = torch.where(finite, share, 0.0)
        for name, part in self.parts.items():
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
        for name, part in self.parts.items():
            weights = part.clone()
            part.copy_(self.averages[name])
            self.averages[name].copy_(weights)
        self.parallel.drop_gathered()

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages, named `parameter/average`."""
        return {f"{name}/{AVERAGE}": average for name, average in self.averages.items()}


# -------------------------------------------------------------------------------------------------------------- qk clip
# QK-clip: scale down the queries and keys of a head whose attention logits exceed a threshold (Kimi K2, arXiv 2507.20534,
# section 2.1, algorithm 1). L layers, H query heads, G key/value heads, D = d_head.


@torch.no_grad()
def clip_logits(parallel: Parallel, largest_logit: Tensor, threshold: float, finite: Tensor) -> Tensor:
    """Multiply W_Q and W_K of each head by sqrt(threshold / largest logit), if this factor is below 1.

    largest_logit (L, H): the largest logit of each head in the last step. Query heads that share a key head have one
    factor, from the largest of their logits.
    Returns the number of scaled heads, 0-dim. If the 0-dim flag `finite` is false, nothing changes; the host does not
    wait for its value.
    """
    n_clipped = torch.zeros((), device=largest_logit.device)
    for layer, (block, layer_logits) in enumerate(zip(parallel.model.blocks, largest_logit, strict=True)):
        attention = block.attention
        n_group = attention.key.out_features // attention.d_head
        heads_in_group = len(layer_logits) // n_group
        group_logits = layer_logits.unflatten(0, (n_group, -1)).amax(1)  # (G,)
        factor = torch.where(finite & (group_logits > threshold), threshold / group_logits, 1.0)
        n_clipped += (factor < 1).sum() * heads_in_group
        for projection, heads in (("query", heads_in_group), ("key", 1)):
            name = f"blocks.{layer}.attention.{projection}"
            device = parallel.local_parameters[f"{name}.weight"].device
            row_factors = factor.sqrt().to(device).repeat_interleave(heads * attention.d_head)  # (rows of the matrix,)
            parallel.local_parameters[f"{name}.weight"].mul_(row_factors[parallel.local_rows(f"{name}.weight"), None])
            if f"{name}.bias" in parallel.local_parameters:
                parallel.local_parameters[f"{name}.bias"].mul_(row_factors[parallel.local_rows(f"{name}.bias")])
    return n_clipped


# ----------------------------------------------------------------------------------------------------------- loss scale
# The loss scale that keeps small fp16 gradients from vanishing (Micikevicius et al. 2018, section 3.2).
#
# Unlike torch's GradScaler, it stays on the device: the host does not wait for an overflow flag before each update.

GROWTH_INTERVAL = 2000  # finite steps until the scale doubles
SMALLEST_SCALE = 1.0  # an overflow at a smaller scale is not caused by fp16's range: the run has failed


class LossScale:
    """A power of two that multiplies the loss in fp16. In other precisions it is inactive and always 1."""

    def __init__(self, device: torch.device, active: bool) -> None:
        self.active = active
        self.factor = torch.full((), 2.0**16 if active else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device)

    def unscale(self, parameters: list[nn.Parameter]) -> None:
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


# ------------------------------------------------------------------------------------------------------------- schedule
# The learning rate as a fraction of its peak: a function of only the step and the planned number of steps.
#
# The planned number of steps may change during the run, until the decay begins, because the rates before the decay do not
# depend on the length. All updates therefore have the same rates as in a run that had the final length from the start.

# Final learning rate as a share of the peak. AdamW's is that of GPT-3 (Brown et al. 2020, appendix B); the rates of Muon were tuned
# with a rate that falls to 0.
FINAL_SHARES = {"muon": 0.0, "adamw": 0.1}


def rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of the update that follows `step` earlier steps, as a fraction of its peak; 0 <= step < steps.

    Warm-up is linear: min(1, (step + 1) / warmup_steps). After it, the rate either follows the cosine of Loshchilov &
    Hutter (2017, arXiv 1608.03983, eq. 5), or stays at its peak and then falls linearly over the last `decay_fraction`
    of the run. Both end at the share of the peak in FINAL_SHARES.
    """
    warmup = min(config.warmup_steps, steps)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if config.schedule == "cosine":
        done = min(1.0, max(0, step - warmup) / max(1, steps - 1 - warmup))
        fall = 0.5 * (1 + math.cos(math.pi * done))
    else:
        fall = min(1.0, (steps - step) / decay_steps(steps, config))
    final = FINAL_SHARES[config.kind]
    return rise * (final + (1 - final) * fall)


def decay_steps(steps: int, config: OptimizerConfig) -> int:
    """The number of updates over which the rate falls at the end of a constant_then_decay run."""
    return max(1, round((config.decay_fraction or 0.0) * steps))


def decay_start(steps: int, config: OptimizerConfig) -> int:
    """The last step whose rate does not depend on the length; the decay begins after this step. Grows with `steps`."""
    if steps < config.warmup_steps:  # the warm-up itself is shorter
        return 0
    return config.warmup_steps if config.schedule == "cosine" else steps - decay_steps(steps, config)


def may_change(step: int, steps: int, config: OptimizerConfig) -> bool:
    """Whether a run planned for `steps` steps may still get another length after `step` steps."""
    return step < steps and step <= decay_start(steps, config)


def shortest_length(step: int, steps: int, config: OptimizerConfig) -> int:
    """The smallest length whose decay begins at `step` or later; steps + 1 if that of `steps` steps begins earlier."""
    return bisect_left(range(steps + 1), step, key=lambda length: decay_start(length, config))


def relength(step: int, steps: int, wanted: int, config: OptimizerConfig) -> int:
    """The new length, after `step` steps, of a run that was planned for `steps` steps and should have `wanted` steps.

    Once the decay has begun, the length does not change. If the decay of a run of `wanted` steps would have begun
    before `step`, the result is the smallest length whose decay begins now. The rates of all updates before `step` are
    the same with the new length.
    """
    if not may_change(step, steps, config):
        return steps
    return max(wanted, shortest_length(step, steps, config), step + 1)


# -------------------------------------------------------------------------------------------------------- the optimizer

BETAS = (0.9, 0.95)  # of AdamW's running means: those of GPT-3 and Llama
# The first pattern that matches a parameter's whole name decides its group.
GROUP_OF_NAME = (
    # LoRA's factors. Muon would make all singular values of A's and of B's update equal, although only their product counts.
    (re.compile(r"blocks\.\d+\.(attention|mlp)\.\w+\.lora_[ab]"), "factor"),
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


def group_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters that are trained, by group and name. Each is in exactly one group.

    1-dim parameters are in "vector", matrices in the other groups. All parameters of a compatibility function are in
    "vector" too, and so are the parameters of a user's own MLP that are not 2-dim.
    """
    groups: dict[str, dict[str, nn.Parameter]] = {
        group: {} for group in ("embedding", "factor", "head", "matrix", "taps", "vector")
    }
    for name, parameter in trained(parameters).items():
        if OF_MLP.fullmatch(name) and not is_factor(name):
            group = "matrix" if parameter.ndim == 2 else "vector"
        else:
            group = next((group for pattern, group in GROUP_OF_NAME if pattern.fullmatch(name)), None)
        assert group is not None, f"no optimizer group for the parameter {name}: add it to GROUP_OF_NAME"
        other = group == "taps" or ".compatibility." in name or OF_MLP.fullmatch(name)
        assert (parameter.ndim == 1) == (group == "vector") or other, (
            f"{name} of shape {tuple(parameter.shape)} is in group {group}"
        )
        groups[group][name] = parameter
    return groups


def trained(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that are not frozen."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


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
    """AdamW for embedding, head, vectors and LoRA's factors; Muon or AdamW for the matrices of the blocks."""

    def __init__(self, parallel: Parallel, config: OptimizerConfig, bf16: bool) -> None:
        """bf16: Muon orthogonalises in bf16."""
        self.parallel, self.config, self.clip_norm = parallel, config, config.clip_norm
        self.names = {parameter: name for name, parameter in trained(parallel.local_parameters).items()}
        groups = group_parameters(parallel.local_parameters)
        transfer = Transfer.of(parallel.model.config, config)
        self.muon = None
        if config.kind != "adamw" and groups["matrix"]:
            matrices = groups.pop("matrix")
            rate_factors = {name: transfer.factors(name).muon_rate for name in matrices}
            self.muon = Muon(matrices, rate_factors, config, bf16, parallel)
        self.adamw = torch.optim.AdamW(adamw_groups(groups, transfer, config), betas=BETAS, fused=True)
        self.average = WeightAverage(parallel, config.average_half_life) if config.average_half_life else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.names)

    def clip(self) -> Tensor:
        """Scale all gradients so that their global norm is at most clip_norm. Returns the unclipped norm, 0-dim.

        Raises UserError for a parameter without a gradient: it would have no state in a checkpoint, which could not be resumed.
        """
        if unused := [name for parameter, name in self.names.items() if parameter.grad is None]:
            raise UserError(
                f"{unused[0]} gets no gradient, because the model does not use it; remove it from your class"
            )
        gradients = [parameter.grad for parameter in self.parameters]
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

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `state_tensors` after the first step."""
        return saved_shapes(self.parallel.local_parameters, self.config)

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state_tensors`, which must hold the state of every parameter and nothing else."""
        remaining = dict(tensors)
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                self.adamw.state[parameter] = {
                    quantity: remaining.pop(f"{self.names[parameter]}/{quantity}").to(parameter.device)
                    for quantity in ("step", "exp_avg", "exp_avg_sq")
                }
        for name, state in self.kept_tensors().items():
            state.copy_(remaining.pop(name))
        assert not remaining, f"optimizer state that no parameter owns: {sorted(remaining)[:3]}"


def adamw_groups(
    groups: dict[str, dict[str, nn.Parameter]], transfer: Transfer, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """The parameter groups of torch's AdamW. Matrices decay, and embedding and head too if AdamW is the only optimizer."""
    peak_rates = {
        "embedding": config.embedding_learning_rate or config.learning_rate,
        "head": config.learning_rate,
        "factor": config.learning_rate,
        "vector": config.learning_rate,
        "taps": config.convolution_learning_rate or config.learning_rate,
        "matrix": config.matrix_learning_rate or config.learning_rate,
    }
    decaying = ("matrix", "embedding", "head") if config.kind == "adamw" else ("matrix",)
    with_same_settings: dict[tuple[str, Factors], list[nn.Parameter]] = defaultdict(list)
    for group, members in groups.items():
        for name, parameter in members.items():
            with_same_settings[group, transfer.factors(name)].append(parameter)
    return [
        {
            "params": parameters,
            "lr": peak_rates[group] * factors.adamw_rate,
            "peak": peak_rates[group] * factors.adamw_rate,
            # torch multiplies it by lr
            "weight_decay": config.decay / factors.adamw_rate if group in decaying else 0.0,
            "eps": config.epsilon * factors.epsilon,
        }
        for (group, factors), parameters in with_same_settings.items()
    ]
