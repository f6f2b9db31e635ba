"""The models of other programs that can be read, by `model_type` of their config.json. A new family is one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, UserError, nearest
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
from andrea.interop.importing.own import own_configs

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
