"""nanochat (Karpathy 2025), in the layout of transformers, read into ours.

Three of its parts have no counterpart here, but equal weights that do: the norm after the embedding, which depends on the
token alone; norms without weights; and rotary positions that turn the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.interop.hugging_face.names import LLAMA_NAMES, renamed
from andrea.interop.importing.config_json import Settings, shapes_of, under_our_names
from andrea.interop.importing.llama import of_llama

DEMANDED = {
    "hidden_act": "relu2",
    "attention_bias": False,
    "tie_word_embeddings": False,  # the embedding is normed, and the head is not
    "quantization_config": None,
}


def nanochat_configs(plain: Mapping[str, Any], name: str) -> tuple[ModelConfig, AttentionConfig]:
    """Raises UserError for a setting that has no counterpart here."""
    settings = Settings(plain, {"rms_norm_eps": 1e-6})
    settings.demand(DEMANDED)
    own = {"mlp": "relu2", "qk_norm": True, "logit_softcap": plain.get("final_logit_softcapping", 15.0)}
    return of_llama(settings, plain, name, own)


def nanochat_weights(
    theirs: Mapping[str, Tensor], model: ModelConfig, attention: AttentionConfig, n_vocab: int
) -> dict[str, Tensor]:
    """The embedding is normed, and the halves of each query's and key's rows change places. Raises UserError."""
    names = {}
    for ours in shapes_of(model, attention, n_vocab):
        names[ours] = renamed(ours, LLAMA_NAMES).replace("up_proj", "fc1").replace("down_proj", "fc2")
    theirs = {name: tensor.float() for name, tensor in theirs.items()}
    for ours, name in names.items():
        if ours.endswith("norm.weight"):
            theirs.setdefault(name, torch.ones(model.d_model))
        elif ours.endswith(("query.weight", "key.weight")) and name in theirs:
            # A turn by -angle of (first half, second half) is a turn by angle of (second half, first half).
            rows, d_head = theirs[name], model.head_width
            if not rows.ndim or len(rows) % d_head:
                raise UserError(
                    f"{name} is {tuple(rows.shape)} in the file, no multiple of the head width {d_head}; copy it again"
                )
            theirs[name] = rows.unflatten(0, (-1, 2, d_head // 2)).flip(1).flatten(0, 2)
    embedding = theirs.get(names["embedding.weight"])
    if embedding is not None and embedding.ndim == 2:
        theirs[names["embedding.weight"]] = rms_norm(embedding, embedding.shape[1:], eps=model.norm_epsilon)
    return under_our_names(theirs, names, model, attention, n_vocab)
