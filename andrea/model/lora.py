"""LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): a frozen matrix W learns a change of low rank.

    y = W x + b + (α / r) B A x

W (n_out, n_in), A (r, n_in), B (n_out, r). Only A and B are trained, for the matrices of attention (queries, keys, values,
output) and of the MLP. B is zero at first, so a run begins with exactly the function of the weights that it starts from. A
rank above that of W is allowed, and has more numbers than W. `merge` adds (α / r) B A to W: every other part of the program
(sampling, export, the lens, another run's init_from) sees a plain model.

Fused code that reads W itself asks `is_plain` (attention/multihead.py), which refuses a layer with factors: queries, keys and
values are then three products. All that comes after these products is as without factors.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Model = TypeVar("Model", bound=nn.Module)  # a GPT; gpt.py imports this file

# α: the same for every rank, so that the learning rate need not be tuned again for another rank (section 4.1). 16 is what
# Dettmers et al. (2023, arXiv 2305.14314, appendix B) use; a rank of 8 then has the usual factor of 2.
# Measured: d_model=96 and 3 layers over bytes, 80 steps of 2,048 tokens on another text, an EPYC. Of the rates 0.001, 0.003 and
# 0.01, ranks 2, 8 and 32 all end best at 0.01 (1.956, 1.875, 1.845 bits per byte); all weights, at a tenth of their rates: 1.892.
ALPHA = 16.0
A, B = ".lora_a", ".lora_b"  # the ends of the factors' names
ADAPTED = {"attention": ("query", "key", "value", "output"), "mlp": ("gate", "up", "down")}


class LowRankLinear(nn.Linear):
    """A linear layer with factors. Its weight and bias are those of `layer`, the same tensors."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(layer.weight.new_zeros(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        self.scale = ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """x (..., n_in) -> y (..., n_out)."""
        return linear(x, self.weight, self.bias) + linear(self.scale * linear(x, self.lora_a), self.lora_b)


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is A or B of a layer."""
    return name.endswith((A, B))


def add_factors(model: nn.Module, rank: int) -> None:
    """Freeze the model, and give each linear layer of ADAPTED its factors. Head gates and value embeddings get none."""
    model.requires_grad_(False)
    for block in model.blocks:
        for part, names in ADAPTED.items():
            module = getattr(block, part)
            for name in names:
                layer = getattr(module, name, None)  # an MLP without a gate has no such layer
                if layer is not None:
                    setattr(module, name, LowRankLinear(layer, rank))


@torch.no_grad()
def initialise_factors(model: nn.Module, generator: torch.Generator) -> None:
    """A is uniform within 1 / sqrt(n_in), as in the code of the paper's authors and in PEFT; B is zero.

    The numbers are drawn in fp32 on the CPU, in the order of the parameters.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(A):
            drawn = 2 * torch.rand(parameter.shape, generator=generator) - 1
            parameter.copy_(drawn / parameter.shape[1] ** 0.5)


def train_vocabulary(model: nn.Module) -> None:
    """Also train the embedding, and the head if it is not tied: tokens that were added have rows that nobody has trained."""
    for weight in {model.embedding.weight, model.head_weight}:
        weight.requires_grad_(True)


@torch.no_grad()
def merged_weight(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + (α / r) B A, computed in fp32, in the type of W (n_out, n_in). a: A (r, n_in). b: B (n_out, r)."""
    return (weight.float() + ALPHA / len(a) * (b.float() @ a.float())).to(weight.dtype)


def adapted_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, LowRankLinear]]:
    """Each layer with factors, after the module that holds it and its name there."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, LowRankLinear):
                yield module, name, layer


@torch.no_grad()
def merge(model: Model) -> Model:
    """A plain copy of the model, with the factors added to their matrices; the model itself if it has no factors."""
    if not model.config.lora_rank:
        return model
    plain = copy.deepcopy(model)
    for module, name, layer in adapted_layers(plain):
        replaced = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        replaced.weight = nn.Parameter(merged_weight(layer.weight, layer.lora_a, layer.lora_b))
        replaced.bias = layer.bias
        setattr(module, name, replaced)
    plain.config = dataclasses.replace(model.config, lora_rank=0)
    return plain
