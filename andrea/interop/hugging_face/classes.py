"""The class of transformers that a model is exported as, and its configuration.

A stock class is chosen where it computes the same function. Otherwise the export has a class of its own, in the file
modeling_andrea.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from andrea.config import UserError
from andrea.interop.hugging_face import names
from andrea.interop.settings import Allowed, Trained, anything, differences, is_one_width, is_positive, settings_of

NO_ROTATION = 1e30  # positions divided by this factor turn nothing: a rotary class without positions
EXACT, FOLDED = 1e-5, 1e-4  # tolerances, as shares of the largest logit; folded: weights were multiplied
REMOTE = "AndreaForCausalLM"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of rope_type=llama3
ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}  # ours -> by transformers' name


@dataclass(frozen=True)
class HuggingFaceClass:
    """A class of transformers. allowed: the settings that it holds, where they differ from PLAIN.

    tolerance: the largest difference of logits, as a share of the largest logit. is_remote: its code is in the export.
    """

    name: str
    model_type: str
    allowed: dict[str, Allowed]
    weights: Callable[[Trained], dict[str, Tensor]]
    own_config: Callable[[Trained], dict[str, Any]]
    tolerance: float = EXACT
    is_remote: bool = False


def choose_class(trained: Trained, is_rounded: bool = False) -> tuple[HuggingFaceClass, str]:
    """The class that holds the model, and why. Raises UserError if none does.

    is_rounded: the weights are stored in fewer than 32 bits; multiplied weights would then be rounded to other numbers.
    """
    missing = [differences(trained, stock.allowed) for stock in STOCK]
    for stock, different in zip(STOCK, missing, strict=True):
        if not different and not (is_rounded and stock.tolerance == FOLDED):
            return stock, f"{stock.name} of transformers computes the same function"
    check_remote(trained)
    fewest = min(missing, key=len)
    nearest = STOCK[missing.index(fewest)].name
    return (
        REMOTE_CODE,
        f"no class of transformers computes this function; the nearest, {nearest}, lacks {', '.join(fewest)}",
    )


def check_remote(trained: Trained) -> None:
    """Raise UserError for a model that modeling_andrea.py does not hold."""
    if trained.attention.compatibility == "additive":
        raise UserError(
            "attention.compatibility=additive cannot be exported: its scores are no dot product, and other programs compute only "
            "those; train with attention=bilinear, or another of scaled_dot, dot and cosine"
        )


# --------------------------------------------------------------------------------------------------- configurations


def shared_config(trained: Trained) -> dict[str, Any]:
    """The keys of config.json that all classes but GPT-2's have in common."""
    model = trained.model
    return {
        "vocab_size": trained.tokenizer.n_vocab,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_mlp,
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": trained.n_kv_head,
        "head_dim": model.head_width,
        "max_position_embeddings": model.sequence_length,
    }


def rotary_config(trained: Trained) -> dict[str, Any]:
    """Rotary positions, also where the model has none: these are divided by so much that nothing turns."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": trained.model.rotary_base}
    if trained.model.position == "none":
        rope |= {"rope_type": "linear", "factor": NO_ROTATION}
    elif trained.model.rotary_scaling is not None:
        scaling = trained.model.rotary_scaling
        kind = "linear" if len(scaling) == 1 else "llama3"
        rope |= {"rope_type": kind} | dict(zip(SCALING, scaling, strict=False))
    return shared_config(trained) | {
        "rope_parameters": rope,
        "rms_norm_eps": trained.model.norm_epsilon,
    }


def llama_config(trained: Trained) -> dict[str, Any]:
    bias = trained.model.bias
    act = "relu2" if trained.model.mlp == "relu2" else "silu"
    return rotary_config(trained) | {"hidden_act": act, "attention_bias": bias, "mlp_bias": bias}


def qwen3_config(trained: Trained) -> dict[str, Any]:
    widths = [width for width in trained.windows if width is not None]
    return rotary_config(trained) | {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": bool(widths),
        "sliding_window": widths[0] if widths else None,
        "layer_types": ["full_attention" if width is None else "sliding_attention" for width in trained.windows],
    }


def apertus_config(trained: Trained) -> dict[str, Any]:
    return rotary_config(trained) | {"hidden_act": "relu2", "attention_bias": False}


def starcoder2_config(trained: Trained) -> dict[str, Any]:
    return rotary_config(trained) | {
        "hidden_act": ACTIVATIONS[trained.model.mlp],
        "norm_epsilon": trained.model.norm_epsilon,
        "use_bias": trained.model.bias,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    }


def vaultgemma_config(trained: Trained) -> dict[str, Any]:
    return rotary_config(trained) | {
        "hidden_activation": "silu",
        "query_pre_attn_scalar": trained.model.head_width,
        "layer_types": ["full_attention"] * trained.model.n_layer,
        "sliding_window": trained.model.sequence_length,  # must be a number; no layer uses it
        "final_logit_softcapping": trained.model.logit_softcap,
        "attn_logit_softcapping": trained.attention.score_softcap,
    }


def gpt_neox_config(trained: Trained) -> dict[str, Any]:
    """Its heads turn the first R of D entries, R = int(D · partial_rotary_factor)."""
    model, n_rotated = trained.model, trained.model.n_rotated
    share = n_rotated / model.head_width
    while int(model.head_width * share) < n_rotated:  # the quotient was rounded down
        share = math.nextafter(share, 2)
    rope = {"rope_type": "default", "rope_theta": model.rotary_base, "partial_rotary_factor": share}
    return shared_config(trained) | {
        "rope_parameters": rope,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": ACTIVATIONS[model.mlp],
        "attention_bias": model.bias,
        "use_parallel_residual": model.parallel_residual,
    }


def gpt2_config(trained: Trained) -> dict[str, Any]:
    model = trained.model
    return {
        "vocab_size": trained.tokenizer.n_vocab,
        "n_embd": model.d_model,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_inner": model.d_mlp,
        "n_positions": model.sequence_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": ACTIVATIONS[model.mlp],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def remote_config(trained: Trained) -> dict[str, Any]:
    """Every setting, under the names of AndreaConfig in modeling_andrea.py."""
    values = settings_of(trained)
    return shared_config(trained) | {
        "auto_map": {
            "AutoConfig": "modeling_andrea.AndreaConfig",
            "AutoModel": "modeling_andrea.AndreaModel",
            "AutoModelForCausalLM": f"modeling_andrea.{REMOTE}",
        },
        "position": trained.model.position,
        "rotary_base": trained.model.rotary_base,
        "rotary_share": trained.model.rotary_share,
        "rotary_scaling": values["model.rotary_scaling"],
        "parallel_residual": trained.model.parallel_residual,
        "norm": trained.model.norm,
        "norm_epsilon": trained.model.norm_epsilon,
        "windows": trained.windows,
        "attn_logit_softcapping": trained.attention.score_softcap,
        "final_logit_softcapping": trained.model.logit_softcap,
        **{key.split(".")[1]: values[key] for key in REMOTE_SETTINGS},
    }


REMOTE_SETTINGS = (
    "model.mlp",
    "model.bias",
    "model.qk_norm",
    "model.value_residual",
    "model.value_embedding",
    "model.qkv_convolution",
    "model.bigram_rows",
    "attention.compatibility",
    "attention.gate",
    "attention.exclusive",
    "attention.sink",
)
BOTH = {False, True}
RELU2, ROUND = {"relu2"}, set(ACTIVATIONS)
NORMED = {True, "learned"}
STOCK = (
    HuggingFaceClass(
        "LlamaForCausalLM",
        "llama",
        {"model.bias": BOTH, "model.rotary_scaling": anything},
        names.llama_weights,
        llama_config,
    ),
    HuggingFaceClass(
        "Qwen3ForCausalLM",
        "qwen3",
        {
            "model.n_head": anything,
            "model.qk_norm": NORMED,
            "model.rotary_scaling": anything,
            "attention.window": is_one_width,
        },
        names.qwen3_weights,
        qwen3_config,
    ),
    HuggingFaceClass(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "model.d_head": {None},
            "model.position": {"learned", "none"},
            "model.norm": {"layernorm"},
            "model.mlp": ROUND,
            "model.bias": BOTH,
        },
        names.gpt2_weights,
        gpt2_config,
    ),
    HuggingFaceClass(
        "ArceeForCausalLM", "arcee", {"model.mlp": RELU2, "model.bias": BOTH}, names.llama_weights, llama_config
    ),
    HuggingFaceClass(
        "ApertusForCausalLM",
        "apertus",
        {"model.n_head": anything, "model.mlp": RELU2, "model.qk_norm": NORMED},
        names.apertus_weights,
        apertus_config,
    ),
    HuggingFaceClass(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"model.n_head": anything, "model.norm": {"layernorm"}, "model.mlp": ROUND, "model.bias": BOTH},
        names.starcoder2_weights,
        starcoder2_config,
    ),
    HuggingFaceClass(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {
            "model.d_head": {None},
            "model.position": {"rotary"},
            "model.rotary_share": is_positive,
            "model.norm": {"layernorm"},
            "model.mlp": ROUND,
            "model.bias": BOTH,
            "model.parallel_residual": BOTH,
        },
        names.gpt_neox_weights,
        gpt_neox_config,
    ),
    HuggingFaceClass(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {"model.position": {"rotary"}, "model.logit_softcap": anything, "attention.score_softcap": anything},
        names.vaultgemma_weights,
        vaultgemma_config,
        FOLDED,
    ),
)
REMOTE_CODE = HuggingFaceClass(REMOTE, "andrea", {}, names.llama_weights, remote_config, EXACT, is_remote=True)
