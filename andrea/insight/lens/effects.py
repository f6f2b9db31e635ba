"""The effect of a head on the predicted next token: ablation, and direct logit attribution.

T tokens, H heads, D = d_head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from andrea.insight.lens.trace import LayerTrace, finish_block
from andrea.model.gpt import GPT

LOGITS_AT_ONCE = 1 << 26  # of ablations computed at once: a quarter of a GiB


def next_log_probabilities(model: GPT, after: Tensor) -> Tensor:
    """The last layer's output (B, T, d_model) -> ln p of the next token at each position (B, T, V)."""
    return model.logits(model.final_norm(after)).float().log_softmax(-1)


@torch.no_grad()
def ablate_heads(
    model: GPT, tokens: Tensor, layer: int, trace: LayerTrace, heads: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Ablate one of a layer's `heads` at a time: it writes zeros. Yields (head, ln p of the next token (T, V)).

    tokens (1, T). What the heads write is `LayerTrace.written`. The forward pass restarts at this layer, from the
    residual stream in `trace`.
    """
    n_token = tokens.shape[1]
    at_once = max(1, LOGITS_AT_ONCE // (n_token * model.n_vocab))
    for begin in range(0, len(heads), at_once):
        some = list(heads[begin : begin + at_once])
        written = trace.written.repeat(len(some), 1, 1, 1)  # (ablated heads, H, T, D)
        written[range(len(some)), some] = 0
        x = finish_block(model.blocks[layer], trace.before.expand(len(some), -1, -1), written)
        for block in model.blocks[layer + 1 :]:
            x, _ = block(x, trace.shared)  # all copies share the inputs of the one sequence
        yield from zip(some, next_log_probabilities(model, x), strict=True)


@torch.no_grad()
def logit_attribution(model: GPT, layer: int, head: int, vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Direct logit attribution: the logits that change most when W_O^(h) v is added to the residual stream.

    vectors (T, D): one v for each position. Returns the ids of `count` tokens with the largest increase and of `count`
    tokens with the largest decrease, and these changes, (T, 2 count) each. The final norm is left out, because it
    depends on all other parts of the model.
    """
    unembedding = model.embedding.weight if model.head is None else model.head.weight  # (V, d_model)
    of_head = unembedding @ model.blocks[layer].attention.output_by_head[head]  # (V, D)
    change = vectors @ of_head.T  # (T, V)
    up, down = change.topk(count), change.topk(count, largest=False)
    return torch.cat((up.indices, down.indices), -1), torch.cat((up.values, down.values), -1)
