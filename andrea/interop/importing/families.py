"""The models of other programs that can be read: their configuration and their weights as ours.

Each family of transformers is one line of FAMILIES, by `model_type` of its config.json. The functions raise UserError for what
has no counterpart here. V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, UserError, nearest
from andrea.interop.architectures import ACTIVATIONS, GPT2_NAMES, GPT_NEOX_NAMES, LLAMA_NAMES, REMOTE_SETTINGS
from andrea.interop.importing.config_json import Settings, configs, one_or_all, own_head_width

Configs = tuple[ModelConfig, AttentionConfig]
SIZES = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_mlp": "intermediate_size",
    "sequence_length": "max_position_embeddings",
}

# ---------------------------------------------------------------------- Llama, Mistral, Qwen2 and Qwen3, and our own exports
# Touvron et al. 2023, arXiv 2302.13971; Jiang et al. 2023, arXiv 2310.06825; Yang et al. 2024, arXiv 2412.15115;
# Yang et al. 2025, arXiv 2505.09388.

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


def llama_configs(settings: Settings, name: str) -> Configs:
    """Llama. Mistral is Llama with a window, Qwen2 (and 2.5) Llama with biases of queries, keys and values, and Qwen3 norms
    queries and keys with learned weights."""
    more: dict[str, Any] = {"bias": True}
    if settings["model_type"] == "qwen3":
        settings.demand({"attention_bias": False})
        more = {"qk_norm": "learned"}
    elif settings["model_type"] != "qwen2":
        more = {"bias": settings.get("attention_bias", False) or settings.get("mlp_bias", False)}
    settings.demand(PLAIN)
    sizes = settings.sizes(SIZES | {"norm_epsilon": "rms_norm_eps"})
    model = {
        **sizes,
        **settings.rotary(),
        "name": name,
        "n_kv_head": settings.get("num_key_value_heads") or sizes["n_head"],
        "d_head": own_head_width(settings.get("head_dim"), sizes),
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "tied_head": settings.get("tie_word_embeddings", False),
        **more,
    }
    return configs(model, {"window": settings.windows(sizes["n_layer"])})


def llama_unbiased(settings: Settings) -> tuple[str, ...]:
    """The modules without a bias, if attention or the MLP alone has biases."""
    in_attention, in_mlp = bool(settings.get("attention_bias")), bool(settings.get("mlp_bias"))
    return (ATTENTION if in_mlp else MLP) if in_attention != in_mlp else ()


def own_configs(settings: Settings, name: str) -> Configs:
    """Our own remote-code export. Its code is never run: every setting has its place in config.json."""
    sizes = settings.sizes(SIZES | {"n_kv_head": "num_key_value_heads"})
    chosen: dict[str, dict[str, Any]] = {"model": {}, "attention": {}}
    for theirs, ours in REMOTE_SETTINGS.items():
        if theirs not in settings:
            raise UserError(
                f"config.json lacks {theirs}; copy it again, or export it again if it is of an older version"
            )
        group, key = ours.split(".")
        chosen[group][key] = settings[theirs]
    windows = chosen["attention"]["window"] or [None]
    if not isinstance(windows, list):
        raise UserError(f"windows={windows!r:.60} of config.json is not a list; copy it again")
    of_model = {
        "name": name,
        "d_head": own_head_width(settings.get("head_dim"), sizes),
        "tied_head": settings.get("tie_word_embeddings", True),
    }
    return configs(sizes | chosen["model"] | of_model, chosen["attention"] | {"window": one_or_all(windows)})


# ------------------------------------------------------------------------------------------- GPT-2 (Radford et al. 2019)

GPT2_SIZES = {
    "d_model": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "sequence_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
}
GPT2_DEMANDED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
MLPS = {"gelu_new": "gelu"} | {theirs: ours for ours, theirs in ACTIVATIONS.items()}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # nn.Conv1D keeps (input, output)


def gpt2_configs(settings: Settings, name: str, bias: bool = True) -> Configs:
    """bias: False for models of nanoGPT without biases."""
    settings.demand(GPT2_DEMANDED)
    sizes = settings.sizes(GPT2_SIZES, {"n_positions": settings.get("n_ctx"), "layer_norm_epsilon": 1e-5})
    model = sizes | {
        "name": name,
        "d_mlp": settings.get("n_inner") or (4 * sizes["d_model"] if type(sizes["d_model"]) is int else None),
        "position": "learned",
        "norm": "layernorm",
        "mlp": settings.choice("activation_function", "gelu_new", MLPS),
        "bias": bias,
        "tied_head": settings.get("tie_word_embeddings", True),
    }
    return configs(model, {})


def gpt2_weights(theirs: Mapping[str, Tensor], model: ModelConfig, is_transposed: bool = True) -> dict[str, Tensor]:
    """Matrices are transposed (not those of nanoGPT), and the one matrix of queries, keys and values is split."""
    parts: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if not name.startswith(("transformer.", "lm_head.")):  # the first files of GPT-2
            name = f"transformer.{name}"  # noqa: PLW2901 (as in later files)
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
    return parts


# --------------------------------------------------------------------------------------------------------------- nanoGPT
# GPT-2 with the exact GELU, the vocabulary of GPT-2, and linear layers whose matrices are not transposed.

N_GPT2 = 50257  # tokens of GPT-2's vocabulary; nanoGPT rounds the rows up to 50304


def nanogpt_configs(arguments: Mapping[str, Any], name: str) -> Configs:
    """arguments: the checkpoint's model_args."""
    keys = ("n_embd", "n_layer", "n_head", "block_size", "bias", "vocab_size")
    if missing := [key for key in keys if key not in arguments]:
        raise UserError(f"the checkpoint's model_args lack {', '.join(missing)}; is it one of nanoGPT?")
    if wrong := [key for key in keys if type(arguments[key]) not in (int, bool)]:
        raise UserError(f"{wrong[0]} of the checkpoint's model_args is not a number; is it one of nanoGPT?")
    if arguments["vocab_size"] not in (N_GPT2, 50304):
        raise UserError(
            f"the checkpoint has {arguments['vocab_size']!r:.20} tokens, but only GPT-2's vocabulary (50257, or 50304 rows) can be "
            f"imported: a file of nanoGPT holds no vocabulary of characters"
        )
    as_gpt2 = {"n_positions": arguments["block_size"], "activation_function": "gelu"}
    return gpt2_configs(Settings({key: arguments[key] for key in keys[:3]} | as_gpt2), name, arguments["bias"])


def nanogpt_weights(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The rows beyond GPT-2's vocabulary are left out: no token has their numbers."""
    rows = {
        name: each[:N_GPT2] if name in ("transformer.wte.weight", "lm_head.weight") else each
        for name, each in theirs.items()
    }
    return gpt2_weights(rows, model, is_transposed=False)


# --------------------------------------------------------------------------------------------------- GPT-NeoX and Pythia
# Black et al. 2022, arXiv 2204.06745; Biderman et al. 2023, arXiv 2304.01373.


def gpt_neox_configs(settings: Settings, name: str) -> Configs:
    sizes = settings.sizes(SIZES | {"norm_epsilon": "layer_norm_eps"}, {"layer_norm_eps": 1e-5})
    model = {
        **sizes,
        **settings.rotary(settings.get("rotary_emb_base", 10000.0)),
        "name": name,
        "rotary_share": rotary_share(settings, sizes),
        "norm": "layernorm",
        "mlp": settings.choice("hidden_act", "gelu", MLPS | {"gelu_fast": "gelu"}),
        "bias": True,
        "tied_head": settings.get("tie_word_embeddings", False),
        "parallel_residual": settings.get("use_parallel_residual", True),
    }
    return configs(model, {})


def rotary_share(settings: Settings, sizes: Mapping[str, Any]) -> float:
    """model.rotary_share: R / D for the R = int(D · rotary_pct) entries of a head that turn."""
    rope = settings.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = settings.get("rotary_pct", 0.25) if share is None else share
    d_model, n_head = sizes["d_model"], sizes["n_head"]
    if not all(type(each) is int and each > 0 for each in (d_model, n_head)) or d_model % n_head:
        raise UserError(
            f"hidden_size={d_model!r:.60} of config.json is not divided by num_attention_heads={n_head!r:.60}"
        )
    if type(share) not in (int, float) or not 0 < share <= 1 or int(d_model // n_head * share) % 2:
        raise UserError(f"rotary_pct={share!r:.60} of config.json does not turn an even number of a head's entries")
    return int(d_model // n_head * share) / (d_model // n_head)


def gpt_neox_weights(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The one matrix of queries, keys and values, (H, 3, D) rows, is split, and rows are reordered."""
    n_head, d_head = model.n_head, model.head_width
    order = rotated_first(d_head, model.n_rotated).argsort()
    parts: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
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
    return parts


def rotated_first(d_head: int, n_rotated: int) -> Tensor:
    """The order of a head's entries, (D,), in which GPT-NeoX has them.

    Of D entries here, p and D/2 + p turn together for p < R/2. In GPT-NeoX the first R turn, p with R/2 + p.
    """
    entries = torch.arange(d_head).view(2, d_head // 2)
    turned, left = entries[:, : n_rotated // 2], entries[:, n_rotated // 2 :]
    return torch.cat((turned.flatten(), left.flatten()))


# -------------------------------------------------------------------------------------------------------------- the list


@dataclass(frozen=True)
class Family:
    """configs: config.json and a name -> our configuration. names: see `renamed`.

    unbiased: config.json -> ends of the names of modules without a bias, where others have one.
    weights: their weights and our configuration -> the weights in our form, under their names.
    """

    configs: Callable[[Settings, str], Configs]
    names: dict[str, str]
    unbiased: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
    weights: Callable[[Mapping[str, Tensor], ModelConfig], Mapping[str, Tensor]] = lambda theirs, model: theirs


def gpt_neox_unbiased(settings: Settings) -> tuple[str, ...]:
    return () if settings.get("attention_bias", True) else ("attention.query_key_value", "attention.dense")


LLAMA = Family(llama_configs, LLAMA_NAMES, llama_unbiased)
FAMILIES = {
    "andrea": Family(own_configs, LLAMA_NAMES),
    "gpt2": Family(gpt2_configs, GPT2_NAMES, weights=gpt2_weights),
    "gpt_neox": Family(gpt_neox_configs, GPT_NEOX_NAMES, gpt_neox_unbiased, gpt_neox_weights),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Family(llama_configs, LLAMA_NAMES, lambda settings: ("self_attn.o_proj", *MLP)),
    "qwen3": Family(llama_configs, LLAMA_NAMES),
}


def family_of(settings: Settings) -> Family:
    """Raises UserError for a kind of model that cannot be read."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = nearest(kind, FAMILIES) if isinstance(kind, str) else ""
        raise UserError(
            f"model_type={kind!r:.60} of config.json cannot be imported; importable: {', '.join(FAMILIES)}{hint}"
        )
    if settings.get("quantization_config") is not None:
        raise UserError(
            "quantization_config of config.json has no counterpart here: import the model's files in 16 or 32 bits"
        )
    return FAMILIES[kind]
