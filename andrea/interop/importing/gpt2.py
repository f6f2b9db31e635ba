"""GPT-2 (Radford et al. 2019) in the layout of transformers, read into ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.interop.hugging_face.classes import ACTIVATIONS
from andrea.interop.hugging_face.names import GPT2_NAMES, renamed
from andrea.interop.importing.config_json import Settings, configs, shapes_of, under_our_names

SIZES = {
    "d_model": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "sequence_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
}
MLPS = {"gelu_new": "gelu"} | {theirs: ours for ours, theirs in ACTIVATIONS.items()}
DEMANDED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# Tables of the causal mask, which old files hold.
MASKS = (".attn.bias", ".attn.masked_bias")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # nn.Conv1D keeps (input, output)


def gpt2_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Raises UserError for a setting that has no counterpart here."""
    settings = Settings(plain, {"n_positions": plain.get("n_ctx"), "layer_norm_epsilon": 1e-5})
    settings.demand(DEMANDED)
    sizes = settings.sizes(SIZES)
    d_mlp = plain.get("n_inner") or (4 * sizes["d_model"] if type(sizes["d_model"]) is int else None)
    model = sizes | {
        "name": name,
        "d_mlp": d_mlp,
        "position": "learned",
        "norm": "layernorm",
        "mlp": settings.choice("activation_function", "gelu_new", MLPS),
        "bias": True,
        "tied_head": plain.get("tie_word_embeddings", True),
    }
    return configs(model, {})


def gpt2_weights(
    theirs: Mapping[str, Tensor],
    model: ModelConfig,
    attention: AttentionConfig,
    n_vocab: int,
    is_transposed: bool = True,
) -> dict[str, Tensor]:
    """Matrices are transposed (not those of nanoGPT), and the one matrix of queries, keys and values is split. Raises UserError."""
    # The first files of GPT-2 have no `transformer.` in front of their names.
    theirs = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in theirs.items()
        if not name.endswith(MASKS)
    }
    parts: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if is_transposed and name.endswith(TRANSPOSED) and tensor.ndim == 2:
            tensor = tensor.T  # noqa: PLW2901 (as nn.Linear keeps it)
        if ".c_attn." in name:
            if tensor.shape[0] != 3 * model.d_model:
                raise UserError(
                    f"{name} has {tensor.shape[0]} columns, but {3 * model.d_model} by config.json; copy both again"
                )
            for kind, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                parts[name.replace("c_attn", kind)] = part
        else:
            parts[name] = tensor
    names = {}
    for name in shapes_of(model, attention, n_vocab):
        names[name] = renamed(name, GPT2_NAMES).replace(".attention.", ".attn.")
    return under_our_names(parts, names, model, attention, n_vocab)
