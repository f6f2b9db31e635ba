"""Our own remote-code exports (modeling_andrea.py) read back. Their code is never run: config.json and weights say it all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.interop.hugging_face.classes import REMOTE_SETTINGS
from andrea.interop.importing.config_json import Settings, configs, one_or_all, own_head_width

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
    """Every setting has its place in config.json. Raises UserError."""
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
