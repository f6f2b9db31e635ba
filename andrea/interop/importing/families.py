"""The models of other programs that can be read, by `model_type` of their config.json. A new family is one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, UserError, nearest
from andrea.interop.hugging_face.classes import REMOTE_SETTINGS
from andrea.interop.importing.config_json import Settings, configs, one_or_all, own_head_width
from andrea.interop.importing.gpt2 import gpt2_configs, gpt2_weights
from andrea.interop.importing.gpt_neox import gpt_neox_configs, gpt_neox_unbiased, gpt_neox_weights
from andrea.interop.importing.llama import (
    llama_configs,
    llama_unbiased,
    llama_weights,
    qwen2_configs,
    qwen2_unbiased,
    qwen3_configs,
)

SIZES = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "d_mlp": "intermediate_size",
    "sequence_length": "max_position_embeddings",
    "position": "position",
    "rotary_base": "rotary_base",
    "rotary_share": "rotary_share",
    "norm": "norm",
    "norm_epsilon": "norm_epsilon",
}


def own_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Our own remote-code export. Its code is never run: every setting has its place in config.json. Raises UserError."""
    sizes = Settings(plain).sizes(SIZES)
    chosen: dict[str, dict[str, Any]] = {"model": {}, "attention": {}}
    for key in REMOTE_SETTINGS:
        group, setting = key.split(".")
        if setting not in plain:
            raise UserError(f"config.json lacks {setting}; copy it again")
        chosen[group][setting] = plain[setting]
    model = (
        sizes
        | chosen["model"]
        | {
            "name": name,
            "d_head": own_head_width(plain.get("head_dim"), sizes),
            "tied_head": plain.get("tie_word_embeddings", True),
            "logit_softcap": plain.get("final_logit_softcapping"),
            "rotary_scaling": plain.get("rotary_scaling"),
            "parallel_residual": plain.get("parallel_residual", False),
        }
    )
    windows = plain.get("windows") or [None]
    if not isinstance(windows, list):
        raise UserError(f"windows={windows!r:.60} of config.json is not a list; copy it again")
    attention = chosen["attention"] | {
        "score_softcap": plain.get("attn_logit_softcapping"),
        "window": one_or_all(windows),
    }
    return configs(model, attention)


Configs = tuple[ModelConfig, AttentionConfig]


@dataclass(frozen=True)
class Family:
    """configs: config.json and a name -> our configuration. weights: their weights, our configuration and V -> ours.
    unbiased: config.json -> ends of the names of modules without a bias, where others have one.

    configs and weights raise UserError for what has no counterpart here.
    """

    configs: Callable[[Mapping[str, Any], str], Configs]
    weights: Callable[[Mapping[str, Tensor], ModelConfig, AttentionConfig, int], dict[str, Tensor]]
    unbiased: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda plain: ()


FAMILIES = {
    "andrea": Family(own_configs, llama_weights),
    "gpt2": Family(gpt2_configs, gpt2_weights),
    "gpt_neox": Family(gpt_neox_configs, gpt_neox_weights, gpt_neox_unbiased),
    "llama": Family(llama_configs, llama_weights, llama_unbiased),
    "mistral": Family(llama_configs, llama_weights, llama_unbiased),
    "qwen2": Family(qwen2_configs, llama_weights, qwen2_unbiased),
    "qwen3": Family(qwen3_configs, llama_weights),
}


def family_of(plain: Mapping[str, Any]) -> Family:
    """Raises UserError for a kind of model that cannot be read."""
    kind = plain.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = nearest(kind, FAMILIES) if isinstance(kind, str) else ""
        raise UserError(
            f"model_type={kind!r:.60} of config.json cannot be imported; importable: {', '.join(FAMILIES)}{hint}"
        )
    if plain.get("quantization_config") is not None:
        raise UserError(
            "quantization_config of config.json has no counterpart here: import the model's files in 16 or 32 bits"
        )
    return FAMILIES[kind]
