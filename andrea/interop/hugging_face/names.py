"""Names and shapes of the weights in transformers' models.

The remote-code class (modeling_andrea.py) and the stock classes of Llama's family share Llama's names. V vocabulary, D width of
a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from andrea.interop.settings import Trained

# The beginning or the middle of a name here, and in Llama's family.
LLAMA_NAMES = {
    "bigram_embedding.": "model.bigram_embedding.",
    "embedding.": "model.embed_tokens.",
    "position.weight": "model.embed_positions.weight",
    "final_norm.": "model.norm.",
    "head.": "lm_head.",
    "blocks.": "model.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".mlp.gate.": ".mlp.gate_proj.",
    ".mlp.up.": ".mlp.up_proj.",
    ".mlp.down.": ".mlp.down_proj.",
    ".attention.query.": ".self_attn.q_proj.",
    ".attention.key.": ".self_attn.k_proj.",
    ".attention.value.": ".self_attn.v_proj.",
    ".attention.output.": ".self_attn.o_proj.",
    ".attention.query_norm": ".self_attn.q_norm.weight",
    ".attention.key_norm": ".self_attn.k_norm.weight",
    ".attention.": ".self_attn.",
}
GPT2_NAMES = {
    "embedding.": "transformer.wte.",
    "position.weight": "transformer.wpe.weight",
    "final_norm.": "transformer.ln_f.",
    "head.": "lm_head.",
    "blocks.": "transformer.h.",
    ".attention_norm.": ".ln_1.",
    ".mlp_norm.": ".ln_2.",
    ".mlp.up.": ".mlp.c_fc.",
    ".mlp.down.": ".mlp.c_proj.",
    ".attention.output.": ".attn.c_proj.",
}

GPT_NEOX_NAMES = {
    "embedding.": "gpt_neox.embed_in.",
    "final_norm.": "gpt_neox.final_layer_norm.",
    "head.": "embed_out.",
    "blocks.": "gpt_neox.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".mlp.up.": ".mlp.dense_h_to_4h.",
    ".mlp.down.": ".mlp.dense_4h_to_h.",
    ".attention.output.": ".attention.dense.",
}


def renamed(name: str, names: dict[str, str]) -> str:
    """The name of a weight in another program: every part of `names` that stands in it is replaced, in order."""
    for ours, theirs in names.items():
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            name = name.replace(ours, theirs, 1)
    return name


def weights_of(trained: Trained) -> dict[str, Tensor]:
    """Our weights by name."""
    return {name: parameter.detach() for name, parameter in trained.gpt.named_parameters()}


def llama_weights(trained: Trained) -> dict[str, Tensor]:
    return {renamed(name, LLAMA_NAMES): weight for name, weight in weights_of(trained).items()}


def qwen3_weights(trained: Trained) -> dict[str, Tensor]:
    """Qwen3 has a learned weight per channel in its norms of queries and keys. Without it (model.qk_norm=true) it is one."""
    weights = llama_weights(trained)
    for layer in range(trained.model.n_layer):
        for each in ("q_norm", "k_norm"):
            weights.setdefault(f"model.layers.{layer}.self_attn.{each}.weight", torch.ones(trained.model.head_width))
    return weights


def gpt2_weights(trained: Trained) -> dict[str, Tensor]:
    """GPT-2 keeps matrices transposed, and queries, keys and values in one matrix, with a bias everywhere.

    Key/value heads that several query heads share are repeated. A model without positions gets positions of zeros.
    """
    ours, model = weights_of(trained), trained.model
    weights = {}
    for name, weight in ours.items():
        theirs = renamed(name, GPT2_NAMES)
        is_matrix = name.startswith("blocks.") and weight.ndim == 2
        if ".attention." not in theirs:
            weights[theirs] = weight.T if is_matrix else weight
    for layer in range(model.n_layer):
        for end in ("weight", "bias") if model.bias else ("weight",):
            parts = [
                with_repeated_heads(ours[f"blocks.{layer}.attention.{each}.{end}"], trained, each != "query")
                for each in ("query", "key", "value")
            ]
            joined = torch.cat(parts)
            weights[f"transformer.h.{layer}.attn.c_attn.{end}"] = joined.T if end == "weight" else joined
    for name in [name for name in weights if name.startswith(("transformer.h.", "transformer.ln_f."))]:
        if name.endswith(".weight"):
            weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(weights[name].shape[-1]))
    weights.setdefault("transformer.wpe.weight", torch.zeros(model.sequence_length, model.d_model))
    return weights


def is_qkv(name: str) -> bool:
    """Whether our weight of this name belongs to the projection of queries, keys or values."""
    return any(f".attention.{each}." in name for each in ("query", "key", "value"))


def rotated_first(d_head: int, n_rotated: int) -> Tensor:
    """The order of a head's entries, (D,), in which GPT-NeoX has them.

    Of D entries here, p and D/2 + p turn together for p < R/2. In GPT-NeoX the first R turn, p with R/2 + p.
    """
    entries = torch.arange(d_head).view(2, d_head // 2)
    turned, left = entries[:, : n_rotated // 2], entries[:, n_rotated // 2 :]
    return torch.cat((turned.flatten(), left.flatten()))


def with_repeated_heads(rows: Tensor, trained: Trained, is_shared: bool) -> Tensor:
    """Rows (G D, …) of key/value heads repeated for each query head, (H D, …); other rows unchanged."""
    if not is_shared:
        return rows
    repeats = trained.model.n_head // trained.n_kv_head
    return rows.unflatten(0, (trained.n_kv_head, -1)).repeat_interleave(repeats, dim=0).flatten(0, 1)
