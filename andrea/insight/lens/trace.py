"""What every head does with a prompt, step by step: the model is walked by hand and every intermediate kept.

B sequences, T tokens, L layers, H heads, D = d_head, N width of a query or key as it is scored (D, but for the additive
function: its hidden width), V vocabulary. All fp32 (the weights' own type), no compilation, no cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import Additive, Mask, Place, attend_reference, documents_of, packed_documents
from andrea.attention.implementations.chunked import attend_chunked
from andrea.attention.shapes import shared_by_group
from andrea.model.gpt import GPT, Block

LOGITS_AT_ONCE = 1 << 26  # numbers of an ablation's logits held at a time: a quarter of a GiB


@dataclass(frozen=True)
class LayerPass:
    """One layer on the way: what came in, what its heads made of it, what it handed on.

    query and key are as they meet: after QK-norm, after the compatibility function has rewritten them as a plain dot
    product, after rotary positions. For the additive function, which has no such form, they are A q and B k.
    Keys and values that several heads share are repeated for each.
    """

    before: Tensor  # (B, T, d_model): the residual stream that the layer read
    query: Tensor  # (B, H, T, N)
    key: Tensor  # (B, H, T, N)
    value: Tensor  # (B, H, T, D)
    scores: Tensor  # (B, H, T, T): -inf where masked
    weights: Tensor  # (B, H, T, T)
    retrieved: Tensor  # (B, H, T, D): z, the weighted sums of the values
    first_value: Tensor | None  # (B, G, T, D): the first layer's values, where later layers mix them in
    after: Tensor  # (B, T, d_model)

    @property
    def visible(self) -> Tensor:
        """(B, T, T) bool: which keys each query sees, the same for all heads."""
        return self.scores[:, 0] > -torch.inf


@torch.no_grad()
def walk(model: GPT, tokens: Tensor) -> Iterator[LayerPass]:
    """tokens (B, T) -> each layer in turn. `model.logits(model.final_norm(last.after))` are the model's own logits."""
    place, packing = surroundings(model, tokens)
    x = model.position.add(model.embedding(tokens), 0)
    first_value = model.first_value(x)
    for block in model.blocks:
        made = pass_through(block, x, first_value, place, packing)
        yield made
        x = made.after


def surroundings(model: GPT, tokens: Tensor) -> tuple[Place | None, Mask | None]:
    """What `GPT.forward` hands to every block besides x: positions, and the documents where they are told apart."""
    packing = None
    if model.end_of_text is not None:
        packing = packed_documents(documents_of(tokens, model.end_of_text)[:, None])
    return model.position.placer(tokens.shape[1], 0), packing


def pass_through(
    block: Block, x: Tensor, first_value: Tensor | None, place: Place | None, packing: Mask | None
) -> LayerPass:
    """`Block.forward`, written out. x (B, T, d_model)."""
    attention = block.attention
    query, key, value, compatibility = attention.project(block.attention_norm(x), None, place, first_value)
    mask = attention.mask if packing is None else packing if attention.mask is None else attention.mask & packing
    attend_readably = attend_chunked if isinstance(compatibility, Additive) else attend_reference
    made = attend_readably(query, key, value, compatibility, mask, 0)
    if isinstance(compatibility, Additive):
        query, key = compatibility.transformed(query, shared_by_group(key, query))
    return LayerPass(
        before=x,
        query=query,
        key=shared_by_group(key, query),
        value=shared_by_group(value, query),
        scores=made.scores,
        weights=made.weights,
        retrieved=made.output,
        first_value=first_value,
        after=leave(block, x, made.output),
    )


def leave(block: Block, x: Tensor, retrieved: Tensor) -> Tensor:
    """The rest of a block after its heads: x (B, T, d_model), retrieved (B, H, T, D) -> (B, T, d_model)."""
    x = x + block.attention.output(retrieved.transpose(1, 2).flatten(2))
    return x + block.mlp(block.mlp_norm(x))


def next_log_probabilities(model: GPT, after: Tensor) -> Tensor:
    """The last layer's output (B, T, d_model) -> ln p of the token after each position (B, T, V)."""
    return model.logits(model.final_norm(after)).float().log_softmax(-1)


@torch.no_grad()
def without_heads(
    model: GPT, tokens: Tensor, layer: int, layer_pass: LayerPass, heads: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Each of a layer's `heads` switched off alone, its z set to zero: (head, ln p of the next token (T, V)).

    tokens (1, T). The pass starts again at this layer, from the residual stream that was kept.
    """
    n_token = tokens.shape[1]
    at_once = max(1, LOGITS_AT_ONCE // (n_token * model.n_vocab))
    for begin in range(0, len(heads), at_once):
        some = list(heads[begin : begin + at_once])
        retrieved = layer_pass.retrieved.repeat(len(some), 1, 1, 1)  # (heads off, H, T, D)
        retrieved[range(len(some)), some] = 0
        place, packing = surroundings(model, tokens.expand(len(some), n_token))
        x = leave(model.blocks[layer], layer_pass.before.expand(len(some), -1, -1), retrieved)
        first_value = layer_pass.first_value
        if first_value is not None:
            first_value = first_value.expand(len(some), -1, -1, -1)
        for block in model.blocks[layer + 1 :]:
            x = block(x, first_value, place, packing, None, None)
        yield from zip(some, next_log_probabilities(model, x), strict=True)


@torch.no_grad()
def pushed_tokens(model: GPT, layer: int, head: int, vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What W_O^(h) times `vectors` (T, D) does to the logits: the `count` tokens pushed up most, then as many down.

    (ids, changes of logits), (T, 2 count) each; the final norm is left out, because it depends on all that is written.
    """
    unembedding = model.embedding.weight if model.head is None else model.head.weight  # (V, d_model)
    of_head = unembedding @ model.blocks[layer].attention.output_by_head[head]  # (V, D)
    change = vectors @ of_head.T  # (T, V)
    up, down = change.topk(count), change.topk(count, largest=False)
    return torch.cat((up.indices, down.indices), -1), torch.cat((up.values, down.values), -1)
