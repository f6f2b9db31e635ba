"""The initial values of all weights."""

from __future__ import annotations

import math

import torch

from andrea.attention.multihead import FIRST_SHARE
from andrea.model.gpt import GPT
from andrea.model.transfer import WRITES_RESIDUAL, Transfer

# Parameters that begin with one number, by the end of their names.
FIRST_VALUES = {
    ".attention.gate.weight": 0.0,
    ".attention.sink": 0.0,
    ".attention.query_norm": 1.0,
    ".attention.key_norm": 1.0,
    ".exclusive_share": FIRST_SHARE,
    ".taps": 0.0,
    ".value_embedding.projection.weight": 0.0,
    ".value_embedding.table.weight": 0.0,
    ".value_embedding.mix": 1.0,
    "bigram_embedding.table.weight": 0.0,
}


@torch.no_grad()
def initialise(model: GPT, generator: torch.Generator, transfer: Transfer | None = None) -> None:
    """Set the initial value of every weight, in the order of `named_parameters`.

    | parameter                                | value                                                             |
    |------------------------------------------|-------------------------------------------------------------------|
    | embedding of a model with an untied head | normal, deviation 0.1, the best in tests on the default data      |
    | tied embedding, learned position, head   | normal, deviation 0.02, as in GPT-2                               |
    | matrices                                 | normal, deviation 0.5 / sqrt(d_in): GPT-2's 0.02 at width 768     |
    | matrices that write into the residual    | the same / sqrt(2 n_layer), so that x does not grow with depth    |
    | norm weights (QK-norm's too), biases     | one, zero                                                         |
    | share of the first layer's values        | zero: the logistic function makes it one half                     |
    | logits of attention sinks                | zero: a 1 + in the softmax's denominator (softmax-off-by-one)     |
    | taps of a convolution                    | zero: queries, keys and values begin unmixed                      |
    | head gates                               | zero: every gate is one                                           |
    | shares of exclusive attention            | one half, the best in tests on the default data                   |
    | value embeddings, their factor           | zero, one: nothing is added; better than drawn weights and zero   |
    | bigrams                                  | zero: nothing is added                                            |
    | compatibility function                   | by its own `Compatibility.initialise`                             |
    | MLP of the user's own                    | by its `initialise(generator)` if it has one, else as above       |

    Each value is multiplied by the factor in `transfer` for another width or depth (andrea/model/transfer.py). The
    numbers are drawn in fp32 on the CPU, so that a seed gives the same model on every device.
    """
    transfer = transfer or Transfer()
    draws_itself = hasattr(model.blocks[0].mlp, "initialise")
    for block in model.blocks:
        block.attention.compatibility.initialise(generator)
        if draws_itself:
            block.mlp.initialise(generator)
    for name, parameter in model.named_parameters():
        if ".compatibility." in name or (draws_itself and ".mlp." in name):
            continue
        first = next((value for end, value in FIRST_VALUES.items() if name.endswith(end)), None)
        if first is not None:
            parameter.fill_(first)
            continue
        if parameter.dim() <= 1:
            parameter.fill_(transfer.factors(name).initial if name.endswith("norm.weight") else 0.0)
            continue
        deviation = 0.1 if name == "embedding.weight" and model.head is not None else 0.02
        if name.startswith("blocks."):
            deviation = 0.5 / math.sqrt(parameter.shape[1])
        if name.endswith(WRITES_RESIDUAL):
            deviation /= math.sqrt(2 * model.config.n_layer)
        deviation *= transfer.factors(name).initial
        parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
