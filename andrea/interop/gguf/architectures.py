"""The architectures of llama.cpp that hold our models, and the names and shapes of their weights.

D = d_head. llama.cpp turns neighbouring entries of a query in the architecture llama, and entries D/2 apart, as we do,
in the others. The rows of the matrices of queries and keys are reordered for the first kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.interop.hugging_face.names import is_qkv, renamed, weights_of, with_repeated_heads
from andrea.interop.settings import Allowed, Trained, anything, differences
from andrea.model.gpt import scaled

EXACT, GELU = 1e-5, 1e-3  # tolerances as shares of the largest logit; llama.cpp's GELU is a table of fp16 numbers

NAMES = {
    "embedding.": "token_embd.",
    "position.weight": "position_embd.weight",
    "final_norm.": "output_norm.",
    "head.": "output.",
    "blocks.": "blk.",
    ".attention_norm.": ".attn_norm.",
    ".mlp_norm.": ".ffn_norm.",
    ".mlp.gate.": ".ffn_gate.",
    ".mlp.up.": ".ffn_up.",
    ".mlp.down.": ".ffn_down.",
    ".attention.query.": ".attn_q.",
    ".attention.key.": ".attn_k.",
    ".attention.value.": ".attn_v.",
    ".attention.output.": ".attn_output.",
    ".attention.query_norm": ".attn_q_norm.weight",
    ".attention.key_norm": ".attn_k_norm.weight",
}


@dataclass(frozen=True)
class Architecture:
    """allowed: the settings that it holds, where they differ from PLAIN. turns_neighbours: see the head of this file.

    joins_qkv: queries, keys and values are one matrix, and every norm and matrix has a bias, zeros where ours has none.
    tolerance: the largest difference of logits with weights in fp32, as a share of the largest logit.
    """

    name: str
    allowed: dict[str, Allowed]
    turns_neighbours: bool = False
    joins_qkv: bool = False
    tolerance: float = EXACT


def is_interpolation(scaling: tuple[float, ...] | None) -> bool:
    """Whether rotary_scaling is none, or the factor alone."""
    return scaling is None or len(scaling) == 1


ARCHITECTURES = (
    Architecture("llama", {"model.rotary_scaling": anything}, turns_neighbours=True),
    Architecture(
        "qwen3",
        {
            "model.n_head": anything,
            "model.qk_norm": {True, "learned"},
            "model.rotary_scaling": is_interpolation,
        },
    ),
    Architecture(
        "gpt2",
        {
            "model.d_head": {None},  # llama.cpp reads matrices of d_model rows in this architecture
            "model.norm": {"layernorm"},
            "model.mlp": {"gelu", "gelu_exact"},  # both by the table
            "model.bias": {False, True},
            "model.position": {"learned", "none"},
        },
        joins_qkv=True,
        tolerance=GELU,
    ),
)


def choose_architecture(trained: Trained) -> Architecture:
    """The architecture that computes the same function. Raises UserError if none does."""
    missing = [differences(trained, architecture.allowed) for architecture in ARCHITECTURES]
    fewest = min(missing, key=len)
    nearest = ARCHITECTURES[missing.index(fewest)]
    if fewest:
        raise UserError(
            f"to=gguf: no architecture of llama.cpp holds this model; the nearest, {nearest.name}, lacks {', '.join(fewest)}; "
            f"train with model=nano-qwen3, which every program reads, or export with to=hf"
        )
    return nearest


def weights_for(trained: Trained, architecture: Architecture) -> dict[str, Tensor]:
    """The weights under llama.cpp's names and in its order of rows."""
    model, weights = trained.model, weights_of(trained)
    if architecture.turns_neighbours:
        for name in [name for name in weights if ".attention.query." in name or ".attention.key." in name]:
            weights[name] = neighbours_first(weights[name], model.head_width)
    if architecture.joins_qkv:
        for name in [
            name for name in weights if name.endswith(".weight") and name.startswith(("blocks.", "final_norm."))
        ]:
            weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weights[name])))
        weights.setdefault("position.weight", torch.zeros(model.sequence_length, model.d_model))
        weights = with_joined_qkv(trained, weights)
    renamed_weights = {renamed(name, NAMES): weight for name, weight in weights.items()}
    if model.qk_norm:
        for layer in range(model.n_layer):
            for each in ("attn_q_norm", "attn_k_norm"):
                renamed_weights.setdefault(f"blk.{layer}.{each}.weight", torch.ones(model.head_width))
    if model.position == "rotary" and not is_interpolation(model.rotary_scaling):
        renamed_weights["rope_freqs.weight"] = slowdown(trained)
    return renamed_weights


def slowdown(trained: Trained) -> Tensor:
    """How many times slower each pair of a head turns by model.rotary_scaling, (R/2,) fp32."""
    n_rotated = trained.model.n_rotated
    frequency = trained.model.rotary_base ** -(torch.arange(0, n_rotated, 2, dtype=torch.float64) / n_rotated)
    return (frequency / scaled(frequency, *trained.model.rotary_scaling)).float()


def neighbours_first(rows: Tensor, d_head: int) -> Tensor:
    """Rows (H D, …) of each head in the order 0, D/2, 1, D/2 + 1, …: pairs that turn together become neighbours."""
    return rows.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2)


def with_joined_qkv(trained: Trained, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with queries, keys and values in one matrix; shared key/value heads are repeated."""
    joined = {name: weight for name, weight in weights.items() if not is_qkv(name)}
    for layer in range(trained.model.n_layer):
        for end in ("weight", "bias"):
            parts = [
                with_repeated_heads(weights[f"blocks.{layer}.attention.{each}.{end}"], trained, each != "query")
                for each in ("query", "key", "value")
            ]
            joined[f"blk.{layer}.attn_qkv.{end}"] = torch.cat(parts)
    return joined
