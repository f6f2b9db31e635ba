"""Weights laid out once for decoding on a CPU.

At one token a step a matrix is read once and used once: time is memory traffic. oneDNN reads bf16 matrices about twice
as fast in its own blocked layout as in torch's (bench/generate.py), and torch would otherwise convert at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from andrea.attention import KeyValueCache
from andrea.model.gpt import GPT
from andrea.model.layers import softcap


def can_pack(model: GPT) -> bool:
    """bf16 weights on a CPU whose oneDNN multiplies in bf16."""
    weight = model.embedding.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedLinear(nn.Module):
    """nn.Linear without gradients, its weight (d_out, d_in) in oneDNN's layout: x (..., d_in) -> (..., d_out)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # The operators that torch.compile itself uses for frozen weights; 1 is the number of rows it is laid out for.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class PackedGPT:
    """The part of GPT that decoding uses; takes the model over and replaces its matrices, the head's included."""

    def __init__(self, model: GPT) -> None:
        self.head = PackedLinear(model.embedding.weight if model.head is None else model.head.weight, None)
        model.head = None
        replace_linears(model)
        self.model = model
        self.config = model.config
        self.make_cache = model.make_cache

    def __call__(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        return self.model(tokens, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)


def replace_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            replace_linears(child)
