"""The model that is exported, and the class of transformers for it, with its configuration and the names of its weights.

A stock class is chosen where it computes the same function. Otherwise the export has a class of its own, in the file
modeling_andrea.py, with Llama's names. V vocabulary, D width of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from andrea.checkpoint import Checkpoint
from andrea.config import AttentionConfig, ModelConfig, UserError, as_typed
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

ODD = "none (of an odd head width)"  # a model.position: rotary classes, in which nothing turns, need an even width
NO_ROTATION = 1e30  # positions divided by this factor turn nothing: a rotary class without positions
TOLERANCE = 1e-5  # the largest difference of logits, as a share of the largest logit
REMOTE = "AndreaForCausalLM"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of rope_type=llama3
ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}  # ours -> by transformers' name
Allowed = set | Callable[[Any], bool]


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint: its weights (`gpt`, fp32), its configuration and its tokenizer. name: of its run."""

    name: str
    checkpoint: Checkpoint
    gpt: GPT
    attention: AttentionConfig
    tokenizer: Tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.gpt.config

    def setting(self, key: str) -> Any:
        """The value of a key, such as model.norm or attention.gate."""
        group, name = key.split(".")
        return getattr(self.model if group == "model" else self.attention, name)

    @property
    def windows(self) -> list[int | None]:
        """Each layer's window: the number of tokens that a token sees; None for all."""
        return [self.attention.window_of(layer) for layer in range(self.model.n_layer)]


# ------------------------------------------------------------------------------------------------------------- settings
# They decide whether another program's architecture can hold a model.


def anything(value: Any) -> bool:
    return True


# What a transformer has that most programs know. An architecture names only where it allows other values.
PLAIN: dict[str, Allowed] = {
    "model.d_head": anything,
    "model.n_head": {None},  # None: a number that divides d_model
    "model.position": {"rotary", "none"},
    "model.rotary_share": {1.0},
    "model.rotary_scaling": {None},
    "model.norm": {"rmsnorm"},
    "model.mlp": {"swiglu"},
    "model.bias": {False},
    "model.qk_norm": {False},
    "model.logit_softcap": {None},
    "model.value_residual": {False},
    "model.value_embedding": {None},
    "model.qkv_convolution": {None},
    "model.bigram_rows": {None},
    "model.parallel_residual": {False},
    "attention.compatibility": {"scaled_dot"},
    "attention.window": {None},
    "attention.gate": {None},
    "attention.exclusive": {None},
    "attention.score_softcap": {None},
    "attention.sink": {False},
}


def differences(trained: Trained, allowed: dict[str, Allowed]) -> list[str]:
    """The settings, as `key=value`, that an architecture cannot hold. allowed: where it differs from PLAIN.

    A key that has no effect is taken for that of a plain transformer.
    """
    values = {key: trained.setting(key) for key in PLAIN}
    if trained.model.d_attended == trained.model.d_model:
        values["model.d_head"] = None
    if trained.model.d_model % trained.model.n_head == 0:
        values["model.n_head"] = None
    if trained.model.position != "rotary":
        values["model.rotary_share"] = 1.0
        values["model.rotary_scaling"] = None
    if trained.model.position == "none" and trained.model.head_width % 2:
        values["model.position"] = ODD
    if not any(trained.windows):
        values["attention.window"] = None
    found = []
    for key, value in values.items():
        fits = allowed.get(key, PLAIN[key])
        if not (fits(value) if callable(fits) else value in fits):
            found.append(f"{key}={as_typed(value)}")
    return found


def fewest_differences(trained: Trained, programs: Sequence[Any]) -> tuple[Any, list[str]]:
    """Of classes or architectures, each with `allowed`: the first with the fewest differences, and these."""
    found = [differences(trained, program.allowed) for program in programs]
    fewest = min(found, key=len)
    return programs[found.index(fewest)], fewest


def is_one_width(window: Any) -> bool:
    """Whether all layers with a window have the same."""
    widths = window if isinstance(window, tuple) else (window,)
    return len({width for width in widths if width is not None}) <= 1


# -------------------------------------------------------------------------------------------------------- architectures


@dataclass(frozen=True)
class Architecture:
    """An architecture of another program. allowed: the settings that it holds, where they differ from PLAIN.

    form: our weights in its form, under our names. names: see `renamed`.
    """

    name: str
    allowed: dict[str, Allowed]
    form: Callable[[Trained], dict[str, Tensor]]
    names: dict[str, str]

    def weights(self, trained: Trained) -> dict[str, Tensor]:
        """The weights by their names there."""
        return {renamed(name, self.names): weight for name, weight in self.form(trained).items()}


@dataclass(frozen=True)
class HuggingFaceClass(Architecture):
    """A class of transformers. is_remote: its code is in the export."""

    model_type: str
    own_config: Callable[[Trained], dict[str, Any]]
    is_remote: bool = False


def choose_class(trained: Trained) -> tuple[HuggingFaceClass, str]:
    """The class that holds the model, and why. Raises UserError if none does."""
    nearest, lacking = fewest_differences(trained, STOCK)
    if not lacking:
        return nearest, f"{nearest.name} of transformers computes the same function"
    if trained.attention.compatibility == "additive":
        raise UserError(
            "attention.compatibility=additive cannot be exported: its scores are no dot product, and other programs compute only "
            "those; train with attention=bilinear, or another of scaled_dot, dot and cosine"
        )
    return (
        REMOTE_CODE,
        f"no class of transformers computes this function; the nearest, {nearest.name}, lacks {', '.join(lacking)}",
    )


# -------------------------------------------------------------------------------------------------------------- weights

# The beginning or the middle of a weight's name here, and in other programs; "-" where they have no such part.
NAMES = """\
here                   Llama                         GPT-2                   GPT-NeoX                    llama.cpp
bigram_embedding.      model.bigram_embedding.       -                       -                           -
embedding.             model.embed_tokens.           transformer.wte.        gpt_neox.embed_in.          token_embd.
position.weight        model.embed_positions.weight  transformer.wpe.weight  -                           position_embd.weight
final_norm.            model.norm.                   transformer.ln_f.       gpt_neox.final_layer_norm.  output_norm.
head.                  lm_head.                      lm_head.                lm_head.                    output.
blocks.                model.layers.                 transformer.h.          gpt_neox.layers.            blk.
.attention_norm.       .input_layernorm.             .ln_1.                  .input_layernorm.           .attn_norm.
.mlp_norm.             .post_attention_layernorm.    .ln_2.                  .post_attention_layernorm.  .ffn_norm.
.mlp.gate.             .mlp.gate_proj.               -                       -                           .ffn_gate.
.mlp.up.               .mlp.up_proj.                 .mlp.c_fc.              .mlp.dense_h_to_4h.         .ffn_up.
.mlp.down.             .mlp.down_proj.               .mlp.c_proj.            .mlp.dense_4h_to_h.         .ffn_down.
.attention.query.      .self_attn.q_proj.            -                       -                           .attn_q.
.attention.key.        .self_attn.k_proj.            -                       -                           .attn_k.
.attention.value.      .self_attn.v_proj.            -                       -                           .attn_v.
.attention.output.     .self_attn.o_proj.            .attn.c_proj.           .attention.dense.           .attn_output.
.attention.joined.     -                             .attn.c_attn.           -                           .attn_qkv.
.attention.query_norm  .self_attn.q_norm.weight      -                       -                           .attn_q_norm.weight
.attention.key_norm    .self_attn.k_norm.weight      -                       -                           .attn_k_norm.weight
.attention.            .self_attn.                   .attn.                  -                           -
"""
LLAMA_NAMES, GPT2_NAMES, GPT_NEOX_NAMES, GGUF_NAMES = (
    {ours: theirs[column] for ours, *theirs in map(str.split, NAMES.strip().split("\n")[1:]) if theirs[column] != "-"}
    for column in range(4)
)


def renamed(name: str, names: dict[str, str]) -> str:
    """The name of a weight in another program: every part of `names` that stands in it is replaced, in order."""
    for ours, theirs in names.items():
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            name = name.replace(ours, theirs, 1)
    return name


def weights_of(trained: Trained) -> dict[str, Tensor]:
    """Our weights by name."""
    return {name: parameter.detach() for name, parameter in trained.gpt.named_parameters()}


def normed_weights(trained: Trained) -> dict[str, Tensor]:
    """Our weights with a learned weight per channel in the norms of queries and keys, as Qwen3 has it.

    Without it (model.qk_norm=true) it is one.
    """
    weights = weights_of(trained)
    for layer in range(trained.model.n_layer):
        for each in ("query_norm", "key_norm"):
            weights.setdefault(f"blocks.{layer}.attention.{each}", torch.ones(trained.model.head_width))
    return weights


def transposed_weights(trained: Trained) -> dict[str, Tensor]:
    """As `joined_weights`; GPT-2 in transformers keeps the matrices of its blocks transposed."""
    return {
        name: weight.T if name.startswith("blocks.") and weight.ndim == 2 else weight
        for name, weight in joined_weights(trained).items()
    }


def joined_weights(trained: Trained) -> dict[str, Tensor]:
    """Our weights in GPT-2's form: queries, keys and values are one matrix, `joined`, and there is a bias everywhere.

    Key/value heads that several query heads share are repeated. A model without positions gets positions of zeros.
    """
    weights, model = weights_of(trained), trained.model
    for name in list(weights):
        if name.endswith(".weight") and name.startswith(("blocks.", "final_norm.")):
            weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weights[name])))
    weights.setdefault("position.weight", torch.zeros(model.sequence_length, model.d_model))
    for layer in range(model.n_layer):
        for end in ("weight", "bias"):
            parts = [weights.pop(f"blocks.{layer}.attention.query.{end}")]
            shared = [weights.pop(f"blocks.{layer}.attention.{each}.{end}") for each in ("key", "value")]
            parts += [repeated(rows, model) for rows in shared]
            weights[f"blocks.{layer}.attention.joined.{end}"] = torch.cat(parts)
    return weights


def repeated(rows: Tensor, model: ModelConfig) -> Tensor:
    """Rows (G D, …) of G key/value heads, each of them once for every query head that shares it: (H D, …)."""
    of_heads = rows.unflatten(0, (model.n_key_head, -1))
    return of_heads.repeat_interleave(model.n_head // model.n_key_head, dim=0).flatten(0, 1)


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
        "num_key_value_heads": trained.model.n_key_head,
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
    others = {"rope_parameters": rope, "rms_norm_eps": trained.model.norm_epsilon, "hidden_act": "silu"}
    return shared_config(trained) | others


def llama_config(trained: Trained) -> dict[str, Any]:
    bias = trained.model.bias
    return rotary_config(trained) | {"attention_bias": bias, "mlp_bias": bias}


def qwen3_config(trained: Trained) -> dict[str, Any]:
    widths = [width for width in trained.windows if width is not None]
    return rotary_config(trained) | {
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
    classes = {
        "AutoConfig": "modeling_andrea.AndreaConfig",
        "AutoModel": "modeling_andrea.AndreaModel",
        "AutoModelForCausalLM": f"modeling_andrea.{REMOTE}",
    }
    settings = {theirs: trained.setting(ours) for theirs, ours in REMOTE_SETTINGS.items()}
    return shared_config(trained) | {"auto_map": classes} | settings | {"windows": trained.windows}


# The names of AndreaConfig in modeling_andrea.py, for settings that are not in `shared_config`.
SAME_IN_MODEL = """
    position rotary_base rotary_share rotary_scaling parallel_residual norm norm_epsilon mlp bias qk_norm value_residual
    value_embedding qkv_convolution bigram_rows
""".split()
REMOTE_SETTINGS = {name: f"model.{name}" for name in SAME_IN_MODEL} | {
    "windows": "attention.window",  # of each layer
    "attn_logit_softcapping": "attention.score_softcap",
    "final_logit_softcapping": "model.logit_softcap",
    **{name: f"attention.{name}" for name in ("compatibility", "gate", "exclusive", "sink")},
}
BOTH = {False, True}
STOCK = (
    HuggingFaceClass(
        "LlamaForCausalLM",
        {"model.bias": BOTH, "model.rotary_scaling": anything},
        weights_of,
        LLAMA_NAMES,
        "llama",
        llama_config,
    ),
    HuggingFaceClass(
        "Qwen3ForCausalLM",
        {
            "model.n_head": anything,
            "model.qk_norm": {True, "learned"},
            "model.rotary_scaling": anything,
            "attention.window": is_one_width,
        },
        normed_weights,
        LLAMA_NAMES,
        "qwen3",
        qwen3_config,
    ),
    HuggingFaceClass(
        "GPT2LMHeadModel",
        {
            "model.d_head": {None},
            "model.position": {"learned", "none", ODD},
            "model.norm": {"layernorm"},
            "model.mlp": set(ACTIVATIONS),
            "model.bias": BOTH,
        },
        transposed_weights,
        GPT2_NAMES,
        "gpt2",
        gpt2_config,
    ),
)
REMOTE_CODE = HuggingFaceClass(REMOTE, {}, weights_of, LLAMA_NAMES, "andrea", remote_config, is_remote=True)
