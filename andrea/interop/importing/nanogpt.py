"""Checkpoints of nanoGPT (ckpt.pt) read into ours.

A ckpt.pt is a pickle, the one that this program reads: through torch's `weights_only=True`, which builds tensors and plain
containers and refuses everything else. nanoGPT is GPT-2 with the exact GELU, the vocabulary of GPT-2, and linear layers whose
matrices are not transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.checkpoint.tensors import MOST_DIMENSIONS
from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.interop.importing.config_json import configs
from andrea.interop.importing.gpt2 import gpt2_weights

N_GPT2 = 50257  # tokens of GPT-2's vocabulary; nanoGPT rounds the rows up to 50304
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMPILED = "_orig_mod."  # in front of the names of a compiled model
SIZES = {"d_model": "n_embd", "n_layer": "n_layer", "n_head": "n_head", "sequence_length": "block_size"}


def read_ckpt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """model_args and weights. Raises UserError, also for a file with anything but tensors and plain containers."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        arguments, weights = dict(content["model_args"]), dict(content["model"])
    except Exception as error:  # torch raises many kinds for a damaged file
        if type(error).__name__ == "UnpicklingError":
            raise UserError(
                f"{path} holds more than tensors and plain values, so reading it could run code; it was not read"
            ) from None
        raise UserError(
            f"{path} is no checkpoint of nanoGPT, or damaged ({type(error).__name__}); copy it again"
        ) from None
    if not all(isinstance(name, str) and isinstance(weight, Tensor) for name, weight in weights.items()):
        raise UserError(f"{path} is no checkpoint of nanoGPT: its `model` holds more than tensors; copy it again")
    for name, weight in weights.items():
        if not is_plain(weight):
            raise UserError(f"{path} is damaged: {name:.80} is not an array of finite numbers; copy it again")
    return arguments, {name.removeprefix(COMPILED): weight for name, weight in weights.items()}


def is_plain(weight: Tensor) -> bool:
    """Whether it is an array of finite numbers, all of which are in the file. Other kinds of tensors fail in their own ways."""
    if weight.is_nested or weight.layout != torch.strided or weight.dtype not in FLOATS or weight.device.type != "cpu":
        return False
    is_whole = 0 < weight.ndim <= MOST_DIMENSIONS and weight.nbytes <= weight.untyped_storage().nbytes()
    return is_whole and bool(weight.isfinite().all())


def nanogpt_configs(arguments: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Raises UserError."""
    if missing := [key for key in (*SIZES.values(), "bias", "vocab_size") if key not in arguments]:
        raise UserError(f"the checkpoint's model_args lack {', '.join(missing)}; is it one of nanoGPT?")
    if wrong := [key for key in (*SIZES.values(), "bias", "vocab_size") if type(arguments[key]) not in (int, bool)]:
        raise UserError(f"{wrong[0]} of the checkpoint's model_args is not a number; is it one of nanoGPT?")
    if arguments["vocab_size"] not in (N_GPT2, 50304):
        raise UserError(
            f"the checkpoint has {arguments['vocab_size']!r:.20} tokens, but only GPT-2's vocabulary (50257, or 50304 rows) can be "
            f"imported: a file of nanoGPT holds no vocabulary of characters"
        )
    width = arguments["n_embd"]
    model = {ours: arguments[theirs] for ours, theirs in SIZES.items()} | {
        "name": name,
        "d_mlp": 4 * width if type(width) is int else width,
        "position": "learned",
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "mlp": "gelu_exact",
        "bias": arguments["bias"],
        "tied_head": True,
    }
    return configs(model, {})


def nanogpt_weights(
    theirs: Mapping[str, Tensor], model: ModelConfig, attention: AttentionConfig, n_vocab: int
) -> dict[str, Tensor]:
    """The rows beyond GPT-2's vocabulary are left out: no token has their numbers."""
    rows = {
        name: each[:n_vocab] if name in ("transformer.wte.weight", "lm_head.weight") else each
        for name, each in theirs.items()
    }
    return gpt2_weights(rows, model, attention, n_vocab, is_transposed=False)
