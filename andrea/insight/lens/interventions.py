"""Interventions: the forward pass with one part changed, and the predictions that follow from it.

B sequences, T tokens, H heads, D = d_head, V vocabulary. The pass restarts at the changed layer, from the residual stream in
a `LayerTrace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from andrea.insight.lens.trace import LayerTrace, finish_block, next_log_probabilities
from andrea.model.gpt import GPT

LOGITS_AT_ONCE = 1 << 26  # of ablations computed at once: a quarter of a GiB


@torch.no_grad()
def ablate_heads(
    model: GPT, tokens: Tensor, layer: int, trace: LayerTrace, heads: Sequence[int], last_only: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Ablate one of a layer's `heads` at a time: it writes zeros. Yields (head, ln p of the next token (T, V)).

    tokens (1, T). last_only: yield only ln p after the last token, (1, V). What the heads write is `LayerTrace.written`.
    The forward pass restarts at this layer, from the residual stream in `trace`.
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
        x = x[:, -1:] if last_only else x
        yield from zip(some, next_log_probabilities(model, x), strict=True)
