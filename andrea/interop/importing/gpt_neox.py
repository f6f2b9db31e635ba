"""GPT-NeoX and Pythia (config.json of transformers) read into ours.

Black et al. 2022, arXiv 2204.06745; Biderman et al. 2023, arXiv 2304.01373.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.interop.hugging_face.classes import ACTIVATIONS
from andrea.interop.hugging_face.names import GPT_NEOX_NAMES, renamed, rotated_first
from andrea.interop.importing.config_json import Settings, configs, shapes_of, under_our_names
from andrea.interop.importing.llama import SIZES as LLAMA_SIZES

SIZES = LLAMA_SIZES | {"norm_epsilon": "layer_norm_eps"}
MLPS = {"gelu_new": "gelu", "gelu_fast": "gelu"} | {theirs: ours for ours, theirs in ACTIVATIONS.items()}
# Tables that old files hold: the causal mask, and the frequencies of the rotary positions.
TABLES = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def gpt_neox_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Raises UserError for a setting that has no counterpart here."""
    settings = Settings(plain, {"layer_norm_eps": 1e-5, "rope_theta": plain.get("rotary_emb_base", 10000.0)})
    sizes = settings.sizes(SIZES)
    positions = settings.rotary() | {"rotary_share": rotary_share(plain, sizes)}
    # As our exports have them; other files have neither.
    settings.demand({"num_key_value_heads": sizes["n_head"], "head_dim": sizes["d_model"] // sizes["n_head"]})
    model = (
        sizes
        | positions
        | {
            "name": name,
            "norm": "layernorm",
            "mlp": settings.choice("hidden_act", "gelu", MLPS),
            "bias": True,
            "tied_head": plain.get("tie_word_embeddings", False),
            "parallel_residual": plain.get("use_parallel_residual", True),
        }
    )
    return configs(model, {})


def gpt_neox_unbiased(plain: Mapping[str, Any]) -> tuple[str, ...]:
    return () if plain.get("attention_bias", True) else ("attention.query_key_value", "attention.dense")


def rotary_share(plain: Mapping[str, Any], sizes: Mapping[str, Any]) -> float:
    """model.rotary_share: R / D for the R = int(D · rotary_pct) entries of a head that turn. Raises UserError."""
    rope = plain.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = plain.get("rotary_pct", 0.25) if share is None else share
    d_model, n_head = sizes["d_model"], sizes["n_head"]
    if not all(type(each) is int and each > 0 for each in (d_model, n_head)) or d_model % n_head:
        raise UserError(
            f"hidden_size={d_model!r:.60} of config.json is not divided by num_attention_heads={n_head!r:.60}"
        )
    if type(share) not in (int, float) or not 0 < share <= 1 or int(d_model // n_head * share) % 2:
        raise UserError(f"rotary_pct={share!r:.60} of config.json does not turn an even number of a head's entries")
    return int(d_model // n_head * share) / (d_model // n_head)


def gpt_neox_weights(
    theirs: Mapping[str, Tensor], model: ModelConfig, attention: AttentionConfig, n_vocab: int
) -> dict[str, Tensor]:
    """The one matrix of queries, keys and values, (H, 3, D) rows, is split, and rows are reordered. Raises UserError."""
    n_head, d_head = model.n_head, model.head_width
    order = rotated_first(d_head, model.n_rotated).argsort()
    parts: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if name.endswith(TABLES):
            continue
        name = name.replace("embed_out.", "lm_head.")  # noqa: PLW2901 (the head has either name)
        if ".query_key_value." not in name:
            parts[name] = tensor
            continue
        if tensor.shape[:1] != (3 * model.d_model,):
            raise UserError(
                f"{name} is {tuple(tensor.shape)} in the file, but has {3 * model.d_model} rows by config.json; copy both again"
            )
        for kind, rows in zip(
            ("query", "key", "value"), tensor.unflatten(0, (n_head, 3, d_head)).unbind(1), strict=True
        ):
            rows = rows if kind == "value" else rows[:, order]  # noqa: PLW2901 (in our order)
            parts[name.replace("query_key_value", kind)] = rows.flatten(0, 1)
    names = {
        name: renamed(name, GPT_NEOX_NAMES).replace("embed_out.", "lm_head.")
        for name in shapes_of(model, attention, n_vocab)
    }
    return under_our_names(parts, names, model, attention, n_vocab)
