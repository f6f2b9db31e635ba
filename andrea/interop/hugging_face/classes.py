"""The class of transformers that a model is exported as, and its configuration.

A stock class is chosen where it computes the same function. Otherwise the export has a class of its own, in the file
modeling_andrea.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from andrea.config import UserError
from andrea.interop.hugging_face import names
from andrea.interop.settings import Allowed, Trained, anything, differences, is_one_width, settings_of

NO_ROTATION = 1e30  # positions divided by this factor turn nothing: a rotary class without positions
TOLERANCE = 1e-5  # the largest difference of logits, as a share of the largest logit
REMOTE = "AndreaForCausalLM"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of rope_type=llama3
ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}  # ours -> by transformers' name


@dataclass(frozen=True)
class HuggingFaceClass:
    """A class of transformers. allowed: the settings that it holds, where they differ from PLAIN.

    is_remote: its code is in the export.
    """

    name: str
    model_type: str
    allowed: dict[str, Allowed]
    weights: Callable[[Trained], dict[str, Tensor]]
    own_config: Callable[[Trained], dict[str, Any]]
    is_remote: bool = False


def choose_class(trained: Trained) -> tuple[HuggingFaceClass, str]:
    """The class that holds the model, and why. Raises UserError if none does."""
    missing = [differences(trained, stock.allowed) for stock in STOCK]
    for stock, different in zip(STOCK, missing, strict=True):
        if not different:
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
    return rotary_config(trained) | {"hidden_act": "silu", "attention_bias": bias, "mlp_bias": bias}


def qwen3_config(trained: Trained) -> dict[str, Any]:
    widths = [width for width in trained.windows if width is not None]
    return rotary_config(trained) | {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": bool(widths),
        "sliding_window": widths[0] if widths else None,
        "layer_types": ["full_attention" if width is None else "sliding_attention" for width in trained.windows],
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
            "model.qk_norm": {True, "learned"},
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
            "model.mlp": set(ACTIVATIONS),
            "model.bias": BOTH,
        },
        names.gpt2_weights,
        gpt2_config,
    ),
)
REMOTE_CODE = HuggingFaceClass(REMOTE, "andrea", {}, names.llama_weights, remote_config, is_remote=True)
