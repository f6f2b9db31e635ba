"""The facts that the page shows as text and numbers: about the model, and about every head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from andrea.attention import BUILT_IN, Additive, Cosine, MultiHeadAttention, ScoreModifiers, alibi_slopes
from andrea.attention.mask import Mask, visible_interval
from andrea.attention.multihead import OWN_VALUE_EPSILON
from andrea.insight.lens.head_names import NAMES
from andrea.insight.lens.page.head_data import COMPONENTS
from andrea.insight.lens.page.measurements import Measurements
from andrea.model.gpt import GPT, Block


@dataclass(frozen=True)
class Source:
    """The origin of the model, for the page's title and footer."""

    title: str
    checkpoint: str | None  # its path
    tokenizer: str  # its identity


def model_facts(model: GPT, tokens: Tensor) -> dict[str, Any]:
    """Facts about the model, and about the prompt's tokens (1, T)."""
    config = model.config
    attention = model.blocks[0].attention
    function = type(attention.compatibility)
    name = function.__name__ if function in BUILT_IN.values() else f"{function.__module__}.{function.__name__}"
    modifiers = attention.modifiers or ScoreModifiers()
    functions = [block.attention.compatibility for block in model.blocks]
    visible = [visible_keys(block, model.document_mask(tokens), tokens) for block in model.blocks]
    distinct = list(dict.fromkeys(visible))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.n_layer,
        "heads_per_layer": config.n_head,
        "d_head": config.head_width,
        "kv_heads": config.n_kv_head or config.n_head,
        "sequence_length": config.sequence_length,
        "compatibility": name,
        "lowers": attention.compatibility.lowers,
        "qk_norm": config.qk_norm,
        "position": config.position,
        "rotary_share": config.rotary_share,
        "softcap": modifiers.softcap,
        "slopes": alibi_slopes(config.n_head).tolist() if modifiers.alibi else None,
        "sinks": None if attention.sink is None else [block.attention.sink.tolist() for block in model.blocks],
        "sharpness": [each.log_sharpness.exp().tolist() for each in functions] if function is Cosine else None,
        "mixing": [each.weight.tolist() for each in functions] if function is Additive else None,
        "convolution": [mixture(block.attention) for block in model.blocks] if config.qkv_convolution else None,
        "own_shares": own_shares(model),
        "own_value_epsilon": OWN_VALUE_EPSILON,
        "tokens": tokens[0].tolist(),
        "visible": [{"first": first, "stop": stop} for first, stop in distinct],
        "visible_of_layer": [distinct.index(each) for each in visible],
        "names": [vars(name) for name in NAMES],
        "components": COMPONENTS,
    }


def mixture(attention: MultiHeadAttention) -> list[dict[str, list[float]]]:
    """For each head, the shares of a token itself, of the one before, … in its query, key and value.

    A share is that of the weights' sizes, summed over the head's channels. Heads that share keys and values have the same
    numbers there.
    """
    weights = attention.taps.detach().float()  # (H + 2G, D, K)
    weights = torch.cat([1 + weights[..., :1], weights[..., 1:]], dim=-1).abs().sum(1)
    shares = (weights / weights.sum(-1, keepdim=True)).tolist()
    n_head = attention.query.out_features // attention.d_head
    n_kv_head = (len(shares) - n_head) // 2
    groups = [n_head + head // (n_head // n_kv_head) for head in range(n_head)]
    return [
        {"query": shares[head], "key": shares[group], "value": shares[group + n_kv_head]}
        for head, group in enumerate(groups)
    ]


def own_shares(model: GPT) -> list[list[float]] | None:
    """The share (L, H) of its component along the token's own value that each head's vector loses; None if none does."""
    if not model.blocks[0].attention.is_exclusive:
        return None
    learned = [block.attention.exclusive_share for block in model.blocks]
    return [[1.0] * model.config.n_head if share is None else share.tolist() for share in learned]


def visible_keys(block: Block, packing: Mask | None, tokens: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """tokens (1, T) -> for each query of the block, the index of the first visible key, and one past the last."""
    n_token = tokens.shape[1]
    first, stop = visible_interval(block.attention.mask_with(packing), n_token, n_token, 0, tokens.device)
    return tuple(first.flatten().tolist()), tuple(stop.flatten().tolist())


def head_facts(measurements: Measurements) -> list[dict[str, Any]]:
    """The scores and names of every head, layer by layer."""
    named = measurements.named
    return [
        {
            "prompt": {name: json_number(score[head]) for name, score in measurements.scores.items()},
            "probe": {name: json_number(score[head]) for name, score in measurements.probed.items()},
            "names": named.get(head, []),
        }
        for head in measurements.heads
    ]


def json_number(number: float | Tensor | None) -> float | None:
    """The number with six significant digits, or None for NaN and infinity, which JSON lacks."""
    return None if number is None or not math.isfinite(float(number)) else float(f"{float(number):.6g}")
