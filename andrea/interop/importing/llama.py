"""Llama, Mistral, Qwen2 and Qwen3 (config.json of transformers) read into ours.

Touvron et al. 2023, arXiv 2302.13971; Jiang et al. 2023, arXiv 2310.06825; Yang et al. 2024, arXiv 2412.15115;
Yang et al. 2025, arXiv 2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig
from andrea.interop.hugging_face.names import LLAMA_NAMES, renamed
from andrea.interop.importing.config_json import (
    Settings,
    configs,
    own_head_width,
    shapes_of,
    under_our_names,
)

SIZES = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_mlp": "intermediate_size",
    "sequence_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

# Settings of descendants that compute something else. Files of Llama, Mistral and Qwen lack them, or have these values.
PLAIN = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def llama_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Llama, and Mistral, which is Llama with a window. Raises UserError."""
    settings = Settings(plain)
    settings.demand(PLAIN)
    bias = plain.get("attention_bias", False) or plain.get("mlp_bias", False)
    return of_llama(settings, plain, name, {"bias": bias, "qk_norm": False})


def llama_unbiased(plain: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules without a bias, if attention or the MLP alone has biases."""
    in_attention, in_mlp = bool(plain.get("attention_bias")), bool(plain.get("mlp_bias"))
    return (ATTENTION if in_mlp else MLP) if in_attention != in_mlp else ()


def qwen2_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Qwen2 and Qwen2.5, which are Llama with biases of queries, keys and values. Raises UserError."""
    settings = Settings(plain)
    settings.demand(PLAIN)
    return of_llama(settings, plain, name, {"bias": True, "qk_norm": False})


def qwen2_unbiased(plain: Mapping[str, Any]) -> tuple[str, ...]:
    return ("self_attn.o_proj", *MLP)


def qwen3_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Qwen3, which norms queries and keys with learned weights. Raises UserError."""
    settings = Settings(plain)
    settings.demand(PLAIN | {"attention_bias": False})
    return of_llama(settings, plain, name, {"qk_norm": "learned"})


def of_llama(
    settings: Settings, plain: Mapping[str, Any], name: str, more: dict[str, Any]
) -> tuple[ModelConfig, AttentionConfig]:
    sizes = settings.sizes(SIZES)
    model = (
        sizes
        | settings.rotary()
        | {
            "name": name,
            "n_kv_head": plain.get("num_key_value_heads") or sizes["n_head"],
            "d_head": own_head_width(plain.get("head_dim"), sizes),
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "tied_head": plain.get("tie_word_embeddings", False),
            **more,
        }
    )
    return configs(model, {"window": settings.windows(sizes["n_layer"])})


def llama_weights(
    theirs: Mapping[str, Tensor], model: ModelConfig, attention: AttentionConfig, n_vocab: int
) -> dict[str, Tensor]:
    """Names alone differ. Old files of Llama also hold the frequencies of the rotary positions, which are computed here."""
    theirs = {name: each for name, each in theirs.items() if not name.endswith("rotary_emb.inv_freq")}
    names = {name: renamed(name, LLAMA_NAMES) for name in shapes_of(model, attention, n_vocab)}
    return under_our_names(theirs, names, model, attention, n_vocab)
