"""How large a model is, counted from the model itself built without memory: parameters, FLOPs, bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from andrea.config import AttentionConfig, ModelConfig
from andrea.model.gpt import GPT

END_OF_TEXT = 0  # any token: what is counted does not depend on it


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by part; head is 0 where it is tied to the embedding."""

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norm + self.head


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while training."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def count_parameters(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> Parameters:
    with torch.device("meta"):
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return Parameters(**counts)


def part_of(name: str) -> str:
    """The part of the model a parameter belongs to, by its name: blocks.3.mlp_norm.weight -> norm."""
    module = name.removeprefix("blocks.").lstrip("0123456789.").split(".")[0]
    if module in ("embedding", "position"):
        return "embedding"
    return "norm" if module.endswith("norm") else module


def flops_per_token(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """Training FLOPs a token: forward and backward, which costs twice the forward."""
    return 3 * forward_flops_per_token(config, attention, n_vocab)


def forward_flops_per_token(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """Forward FLOPs a token, averaged over a full sequence.

    A matrix costs 2 FLOPs a parameter (multiply, add); the head counts, tied or not, the embedding lookup does not.
    Attention adds 4 d_model FLOPs (scores, then weighted sum) for each visible key, of which the causal mask leaves
    half the sequence on average (Kaplan et al. 2020, arXiv 2001.08361, table 1, halved for the mask), a window less.
    The tanh of additive scores is not counted.
    """
    with torch.device("meta"):
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
    matrices = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.dim() >= 2)
    head = n_vocab * config.d_model
    length = config.sequence_length
    window = min(attention.window or length, length)
    visible = window - window * window / (2 * length)  # keys a query, on average
    return 2 * (matrices + head) + round(4 * config.n_layer * config.d_model * visible)


def plan_memory(
    config: ModelConfig,
    attention: AttentionConfig,
    n_vocab: int,
    *,
    micro_batch: int,
    precision: str,
    optimizer: str,
) -> Memory:
    """Bytes for fp32 weights and gradients, the optimizer's state and what one micro-batch keeps for its backward.

    optimizer: adamw keeps two fp32 numbers a parameter; muon keeps one for the blocks' matrices, two for the rest.
    Activations are counted by running one forward pass on tensors without memory: what eager code keeps. Compiled code
    keeps what its compiler decides, mostly less.
    """
    if attention.implementation not in ("reference", "chunked"):  # the others need their device, and keep as little
        attention = dataclasses.replace(attention, implementation="auto")
    with FakeTensorMode():
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
        total = sum(parameter.numel() for parameter in model.parameters())
        matrices = sum(
            parameter.numel()
            for name, parameter in model.blocks.named_parameters()
            if parameter.dim() == 2 and ".compatibility." not in name
        )
        activations = activation_bytes(model, micro_batch, precision)
    state = 2 * total - (matrices if optimizer == "muon" else 0)
    return Memory(weights=4 * total, gradients=4 * total, optimizer=4 * state, activations=activations)


def activation_bytes(model: GPT, micro_batch: int, precision: str) -> int:
    """Bytes autograd keeps between the forward and the backward pass of one micro-batch, parameters left out."""
    kept: dict[int, torch.Tensor] = {}  # by storage: several tensors may be views of one
    own = {parameter.untyped_storage()._cdata for parameter in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = tensor
        return tensor

    tokens = torch.zeros(micro_batch, model.config.sequence_length, dtype=torch.int64)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=precision != "fp32"),
    ):
        logits = model.logits(model(tokens))
        cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
