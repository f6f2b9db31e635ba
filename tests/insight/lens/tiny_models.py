"""Tiny models with random weights, and one with weights made by hand, for tests of the lens."""

from __future__ import annotations

import dataclasses
import math

import torch
from head_options import HEAD_OPTIONS, draw_what_starts_alike

from andrea.config import AttentionConfig, ModelConfig
from andrea.model import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
CONFIG = ModelConfig(
    name="tiny", d_model=30, n_layer=3, n_head=5, d_mlp=37, sequence_length=41, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=False, qk_norm=True, logit_softcap=15.0,
    recipe_steps=1, recipe_tokens_per_step=41,
)  # fmt: skip
PROMPT = "say (abc, abc) twice"
CASES = {
    "scaled_dot": ({}, {}),
    "dot": ({}, {"compatibility": "dot"}),
    "bilinear": ({}, {"compatibility": "bilinear"}),
    "cosine": ({"qk_norm": False}, {"compatibility": "cosine"}),
    "additive": ({"position": "learned"}, {"compatibility": "additive"}),
    "fewer key/value heads, biases": ({"n_kv_head": 1, "bias": True, "norm": "layernorm"}, {}),
    "first layer's values": ({"n_kv_head": 1, "value_residual": True}, {}),
    "sliding window": ({}, {"window": 7}),
    "cap, ALiBi and sink": ({"position": "alibi", "n_kv_head": 1}, {"score_softcap": 3.0, "sink": True}),
    "additive with ALiBi": ({"position": "alibi"}, {"compatibility": "additive", "sink": True}),
    "windows by layer": ({"rotary_share": 0.4}, {"window": (7, None)}),
    "convolution": ({"n_kv_head": 1, "qkv_convolution": 3}, {"across_documents": False}),
    "packed documents": ({}, {"across_documents": False}),
    **HEAD_OPTIONS,
    "gpt2-like": ({"position": "learned", "tied_head": True, "mlp": "gelu", "logit_softcap": None}, {}),
}


def make(changes: dict | None = None, attention: dict | None = None, seed: int = 3) -> GPT:
    config = dataclasses.replace(CONFIG, **(changes or {}))
    chosen = AttentionConfig(**({"compatibility": "scaled_dot", "implementation": "auto"} | (attention or {})))
    model = GPT(config, chosen, TOKENIZER.n_vocab, TOKENIZER.end_of_text)
    initialise(model, torch.Generator().manual_seed(seed))
    draw_what_starts_alike(model)
    with torch.no_grad():
        for block in model.blocks:  # sharper than at initialisation, so that heads differ visibly
            block.attention.query.weight.mul_(6)
    return model.eval().requires_grad_(False)


def prompt_tokens(text: str = PROMPT) -> torch.Tensor:
    return torch.tensor([[TOKENIZER.end_of_text, *TOKENIZER.encode(text)]])


def hand_made() -> GPT:
    """An induction circuit of two heads: head 0.0 copies the previous token into the residual stream, and head 1.0 attends
    to the keys where that copy is its own token.

    The residual stream has a part for the token (V), one for the token before (V) and one for the position (S).
    """
    n_vocab, n_token = TOKENIZER.n_vocab, 41
    d_head = n_vocab
    d_model = 3 * d_head
    model = make({
        "d_model": d_model, "n_head": 3, "n_layer": 2, "position": "learned", "qk_norm": False, "d_mlp": 1,
    })  # fmt: skip
    for parameter in model.parameters():
        parameter.zero_()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
    token, before, place = (slice(part * d_head, (part + 1) * d_head) for part in range(3))
    identity = torch.eye(d_head)
    model.embedding.weight[:, token] = identity
    model.position.weight[:, place] = identity[:n_token]
    sharp = 40.0 / math.sqrt(d_model)
    zero, one = model.blocks[0].attention, model.blocks[1].attention
    first = slice(0, d_head)
    zero.query.weight[first, place] = sharp * identity.roll(-1, 0)  # position i attends to i - 1
    zero.key.weight[first, place] = identity
    zero.value.weight[first, token] = identity
    zero.output.weight[before, first] = identity
    one.query.weight[first, token] = sharp * identity
    one.key.weight[first, before] = identity
    return model
