"""Runs the model's forward pass layer by layer, with every intermediate result of attention.

B sequences, T tokens, H heads, D = d_head, V vocabulary, N width of a query or key from which a score is computed (D; for
the additive function its hidden width). The pass runs in the type of the weights (fp32), without compilation and without a
cache.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import Additive, MultiHeadAttention, SharedInputs, attend_reference
from andrea.attention.compatibility import Compatibility
from andrea.attention.grouped_query import repeated_for_query_heads
from andrea.attention.implementations.chunked import additive_scores
from andrea.attention.implementations.reference import Intermediates
from andrea.model.gpt import GPT, Block


@dataclass(frozen=True)
class LayerTrace:
    """The inputs, intermediate results and output of one layer.

    query and key are the factors of the dot product: QK-norm, the compatibility function's factors and rotary positions
    are already applied. The additive function has no dot product; its query and key are A q and B k. For a user's own
    function without a dot product N is T: each query is its row of scores, and key j is the unit vector j, so that
    their dot products are the scores. A soft cap or ALiBi comes after these products. Keys and values that several heads
    share are repeated for each head.
    """

    before: Tensor  # (B, T, d_model): the residual stream that the layer reads
    query: Tensor  # (B, H, T, N)
    key: Tensor  # (B, H, T, N)
    value: Tensor  # (B, H, T, D)
    value_parts: dict[str, Tensor]  # (B, H, T, D) each; their sum is the value before a convolution
    scores: Tensor  # (B, H, T, T): as modified, -inf where masked
    weights: Tensor  # (B, H, T, T)
    sink: Tensor | None  # (H,): logits of the attention sinks, which have the rest of the weight
    retrieved: Tensor  # (B, H, T, D): z, the weighted sum of the values
    gate: Tensor | None  # (B, H, T, 1 or D): the heads' gates; None without gates
    written: Tensor  # (B, H, T, D): what W_O is applied to: z, after exclusion and gate
    shared: SharedInputs  # the layer's inputs besides `before`, the same for all layers
    after: Tensor  # (B, T, d_model)

    @property
    def visible(self) -> Tensor:
        """(B, T, T) bool: the keys that each query sees, the same for all heads."""
        return self.scores[:, 0] > -torch.inf


@torch.no_grad()
def trace_layers(model: GPT, tokens: Tensor) -> Iterator[LayerTrace]:
    """Yields the trace of each layer for tokens (B, T). The logits are `model.logits(model.final_norm(last.after))`."""
    x, shared = model.block_inputs(tokens)
    for block in model.blocks:
        layer = trace_block(block, x, shared)
        yield layer
        x = layer.after


def trace_block(block: Block, x: Tensor, shared: SharedInputs) -> LayerTrace:
    """The computation of `Block.forward` for x (B, T, d_model), with its intermediate results."""
    attention = block.attention
    normed = block.attention_norm(x)
    query, key, value, compatibility = attention.project(normed, shared=shared)
    attended = attend_as(attention, query, key, value, compatibility, shared)
    gate = attention.gates(normed)
    written = attention.finish(attended.output, value, gate)
    if type(compatibility) is Additive:
        query, key = compatibility.transformed(query, repeated_for_query_heads(key, query))
    elif not compatibility.lowers:
        query = compatibility.scores(query, repeated_for_query_heads(key, query)).float()
        key = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand_as(query)
    return LayerTrace(
        before=x,
        query=query,
        key=repeated_for_query_heads(key, query),
        value=repeated_for_query_heads(value, query),
        value_parts={
            name: repeated_for_query_heads(part, query) for name, part in value_parts(attention, normed, shared).items()
        },
        scores=attended.scores,
        weights=attended.weights,
        sink=attention.sink,
        retrieved=attended.output,
        gate=gate,
        written=written,
        shared=shared,
        after=finish_block(block, x, written),
    )


def attend_as(
    attention: MultiHeadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Compatibility,
    shared: SharedInputs,
) -> Intermediates:
    """Attention as the layer computes it, for what `MultiHeadAttention.project` returns."""
    mask = attention.mask_with(shared.packing)
    scores_of = functools.partial(additive_scores, compatibility) if type(compatibility) is Additive else None
    scoring = {"modifiers": attention.modifiers, "sink": attention.sink}
    return attend_reference(query, key, value, compatibility, mask, 0, scores_of, **scoring)


def value_parts(attention: MultiHeadAttention, normed: Tensor, shared: SharedInputs) -> dict[str, Tensor]:
    """The terms of `MultiHeadAttention.mixed`, (B, G, T, D) each; normed (B, T, d_model): what the layer reads."""
    parts = {"this layer's value": attention.values(normed)}
    if attention.value_mix is not None:
        share = torch.sigmoid(attention.value_mix)
        parts = {name: (1 - share) * part for name, part in parts.items()}
        parts["the first layer's"] = share * shared.first_value
    if attention.value_embedding is not None:
        embedded = attention.value_embedding(shared.value_source, normed.dtype)
        parts["the value embedding"] = attention.heads(embedded)
    return parts


def finish_block(block: Block, x: Tensor, written: Tensor) -> Tensor:
    """The rest of a block after its heads: x (B, T, d_model), `LayerTrace.written` (B, H, T, D) -> (B, T, d_model)."""
    attended, transformed = block_outputs(block, x, written)
    return x + attended + transformed


def block_outputs(block: Block, x: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """What a block's attention and its MLP add to x (B, T, d_model), of that shape each. written: as in `finish_block`."""
    attended = block.attention.output(block.attention.merged(written))
    read = x if block.parallel_residual else x + attended
    return attended, block.mlp(block.mlp_norm(read))


# --------------------------------------------------------------------------------------------------------------- logits


def next_log_probabilities(model: GPT, after: Tensor) -> Tensor:
    """The last layer's output (B, T, d_model) -> ln p of the next token at each position (B, T, V)."""
    return model.logits(model.final_norm(after)).float().log_softmax(-1)


@torch.no_grad()
def logit_lens(model: GPT, layers: Sequence[LayerTrace]) -> Iterator[Tensor]:
    """ln p of the next token (T, V), if the model ended after the embedding, after each attention, after each MLP.

    The logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens"): the final norm and the head read the residual
    stream of every stage. Yields 2 L + 1 stages; the last is the model's prediction. layers: the traces of one prompt.
    With a parallel residual, the MLP does not read the stream after attention, but it is shown all the same.
    """
    yield next_log_probabilities(model, layers[0].before)[0]
    for block, trace in zip(model.blocks, layers, strict=True):
        attended, _ = block_outputs(block, trace.before, trace.written)
        yield next_log_probabilities(model, trace.before + attended)[0]
        yield next_log_probabilities(model, trace.after)[0]


@torch.no_grad()
def logit_attribution(model: GPT, layer: int, head: int, vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Direct logit attribution: the logits that change most when W_O^(h) v is added to the residual stream.

    vectors (T, D): one v for each position. Returns the ids of `count` tokens with the largest increase and of `count`
    tokens with the largest decrease, and these changes, (T, 2 count) each. The final norm is left out, because it
    depends on all other parts of the model.
    """
    of_head = model.head_weight @ model.blocks[layer].attention.output_by_head[head]  # (V, D)
    change = vectors @ of_head.T  # (T, V)
    up, down = change.topk(count), change.topk(count, largest=False)
    return torch.cat((up.indices, down.indices), -1), torch.cat((up.values, down.values), -1)
