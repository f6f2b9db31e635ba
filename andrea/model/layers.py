"""Norms, MLPs and the cap on logits. x is (B, T, d_model): B batch, T tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from andrea.config import ModelConfig, UserError
from andrea.runtime.own_parts import is_own, own_class


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":  # Zhang and Sennrich 2019, arXiv 1910.07467
        return RMSNorm(config.d_model, config.norm_epsilon)
    return nn.LayerNorm(config.d_model, config.norm_epsilon, bias=config.bias)


def make_mlp(config: ModelConfig) -> nn.Module:
    """The MLP that config.mlp names: a built-in one, or a class of the user's own by its dotted path.

    A class of the user's own is built with (d_model, d_mlp, bias). Raises UserError if it may not be imported, if a
    checkpoint could not store it, or if its result has another shape than its input.
    """
    if is_own(config.mlp):
        mlp = own_class("model.mlp", config.mlp, nn.Module)(config.d_model, config.d_mlp, config.bias)
        if kept := mlp.state_dict().keys() - dict(mlp.named_parameters()).keys():
            raise UserError(
                f"model.mlp={config.mlp} has the buffer {min(kept)}, but a checkpoint holds parameters only; register it "
                f"with persistent=False, or make it a parameter"
            )
        check_shape(config, mlp)
        return mlp
    if config.mlp == "swiglu":
        return SwiGLU(config.d_model, config.d_mlp, config.bias)
    return MLP(config.d_model, config.d_mlp, config.bias, ACTIVATIONS[config.mlp])


def check_shape(config: ModelConfig, mlp: nn.Module) -> None:
    """Raises UserError unless a user's MLP gives x (B, T, d_model) for such an x."""
    x = torch.zeros(2, 3, config.d_model)
    if x.is_meta:  # a model that is only counted; an operation of the user's may know no such tensors
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        y = mlp.eval()(x)
    mlp.train()
    shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
    if shape != tuple(x.shape):
        raise UserError(
            f"model.mlp={config.mlp}: for x {tuple(x.shape)} its result must have this shape, but it is {shape}"
        )


class RMSNorm(nn.RMSNorm):
    """RMS norm, computed in the type of its input.

    The weight is cast to this type, because torch's fused kernel requires equal types, and FSDP may gather the weight
    in bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class MLP(nn.Module):
    """down(activation(up(x))): from d_model to d_mlp and back (Vaswani et al. 2017, arXiv 1706.03762, section 3.3)."""

    def __init__(self, d_model: int, d_mlp: int, bias: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_mlp, bias)
        self.down = nn.Linear(d_mlp, d_model, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, eq. 6)."""

    def __init__(self, d_model: int, d_mlp: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_mlp, bias)
        self.up = nn.Linear(d_model, d_mlp, bias)
        self.down = nn.Linear(d_mlp, d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv 2109.08668)."""
    return functional.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, which GPT-2 uses (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    return functional.gelu(x, approximate="tanh")


def gelu_exact(x: Tensor) -> Tensor:
    """x · Φ(x), where Φ is the normal distribution function (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    return functional.gelu(x)


ACTIVATIONS = {"relu2": relu_squared, "gelu": gelu, "gelu_exact": gelu_exact}  # of MLP, by model.mlp


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap), in fp32: limits logits of any shape smoothly to -cap .. cap (Gemma 2, arXiv 2408.00118,
    section 2)."""
    return cap * torch.tanh(logits.float() / cap)
