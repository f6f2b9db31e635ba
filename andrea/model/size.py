"""Parameters and FLOPs of a model. They are counted on the model itself, built on the meta device without memory."""

import dataclasses
import re
from dataclasses import dataclass

import torch

from andrea.config import AttentionConfig, ModelConfig
from andrea.model.gpt import GPT

END_OF_TEXT = 0  # any token: the counts do not depend on it


@dataclass(frozen=True)
class Parameters:
    """Number of parameters of each part. `head` is 0 if the head is tied to the embedding."""

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norm + self.head


def without_memory(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> GPT:
    """The model on the meta device."""
    with torch.device("meta"):
        return GPT(config, attention, n_vocab, END_OF_TEXT)


def count_parameters(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> Parameters:
    """Number of parameters of the model's parts, for a vocabulary of n_vocab tokens."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    for name, parameter in without_memory(config, attention, n_vocab).named_parameters():
        counts[part_of(name)] += parameter.numel()
    return Parameters(**counts)


def count_trained(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """Number of parameters that training changes: all of them, or LoRA's factors."""
    parameters = without_memory(config, attention, n_vocab).parameters()
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def parameters_without_bigrams(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """Number of parameters but for a table of bigrams. Lengths are planned with it: a run that reads its text often leaves
    the table out, and how often it reads the text depends on its length.
    """
    return count_parameters(dataclasses.replace(config, bigram_rows=None), attention, n_vocab).total


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: blocks.3.mlp_norm.weight -> norm."""
    if ".table." in name:  # of a value embedding
        return "embedding"
    module = name.removeprefix("blocks.").lstrip("0123456789.").split(".")[0]
    if module in ("embedding", "position"):
        return "embedding"
    return "norm" if module.endswith("norm") else module


def flops_per_token(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """Training FLOPs per token. The backward pass costs twice as much as the forward pass; with LoRA less, which is not counted."""
    return 3 * forward_flops_per_token(config, attention, n_vocab)


def forward_flops_per_token(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """Forward FLOPs per token, averaged over a full sequence.

    A matrix costs 2 FLOPs per parameter, a multiplication and an addition. The head is counted, tied or not; the lookups of
    embeddings and value tables are not. Attention adds 4 H D FLOPs for each visible key, for H heads of width D: 2 H D for the
    scores and 2 H D for the weighted sum. On average the causal mask leaves half the sequence visible, so the attention term is
    half of that in Kaplan et al. 2020, arXiv 2001.08361, table 1. In a layer with a sliding window even fewer keys are
    visible. The tanh of additive scores and a convolution are not counted.
    """
    model = without_memory(config, attention, n_vocab)
    uncounted = re.compile(r".*(\.table\..+|\.taps)")
    products = [each for name, each in model.blocks.named_parameters() if each.dim() >= 2 and not uncounted.match(name)]
    matrices = sum(parameter.numel() for parameter in products)
    head = n_vocab * config.d_model
    visible = sum(mean_visible(attention.window_of(layer), config.sequence_length) for layer in range(config.n_layer))
    return 2 * (matrices + head) + round(4 * config.d_attended * visible)


def mean_visible(window: int | None, length: int) -> float:
    """Number of keys that a query of a full sequence sees, on average over the sequence."""
    window = min(window or length, length)
    return window - window * window / (2 * length)
