"""Scores that measure where a head attends.

B sequences, T tokens, L layers, H heads. Except for the entropy, each score defines target keys for every query
(`TARGETS`). The score is the weight on the targets, averaged over the queries that see at least one target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from andrea.attention.statistics import statistics_of_scores
from andrea.insight.lens.trace import LayerTrace, trace_layers
from andrea.model.gpt import GPT

# -------------------------------------------------------------------------------------------------------- targets


def previous_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets bool (B, T, T): the key just before the query. tokens (B, T); pieces: the bytes of each token."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return (position[:, None] - 1 == position).expand(len(tokens), -1, -1)


def first_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets: key 0, except for query 0 (attention sinks: Xiao et al. 2023, arXiv 2309.17453)."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return ((position[:, None] > 0) & (position == 0)).expand(len(tokens), -1, -1)


def same_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets: earlier copies of the query's token (duplicate-token heads: Wang et al. 2022, arXiv 2211.00593)."""
    return (tokens[:, :, None] == tokens[:, None, :]).tril(-1)


def induction(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets: earlier keys just after a copy of the query's token.

    Source: Olsson et al. 2022, arXiv 2209.11895 (induction heads).
    """
    preceding = tokens.roll(1, dims=1)
    found = (tokens[:, :, None] == preceding[:, None, :]).tril(-1)
    found[:, :, 0] = False  # nothing precedes key 0
    return found


def opener(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Target: the token with the innermost bracket or quote that is open at the query.

    The token just before the query is not a target, because a previous-token head attends to it too.
    """
    found = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    for row, texts in enumerate(pieces):
        for query, key in enumerate(open_at(texts)):
            if key is not None and key < query - 1:
                found[row, query, key] = True
    return found.to(tokens.device)


TARGETS: dict[str, Callable[[Tensor, Sequence[Sequence[bytes]]], Tensor]] = {
    target.__name__: target for target in (previous_token, first_token, same_token, induction, opener)
}

CLOSING = {ord("("): ord(")"), ord("["): ord("]"), ord("{"): ord("}")}
QUOTES = (ord("'"), ord('"'))


def open_at(pieces: Sequence[bytes]) -> list[int | None]:
    """For each token t: the index of the token with the innermost bracket or quote that is open after t, or None.

    Brackets inside a quote do not count. The end of a line closes a quote. ' after a letter or digit is an apostrophe.
    """
    awaited: list[tuple[int, int]] = []  # (the byte that closes, token of the opener), innermost last
    before, found = ord(" "), []
    for index, piece in enumerate(pieces):
        for byte in piece:
            in_quote = bool(awaited) and awaited[-1][0] in QUOTES
            if awaited and (byte == awaited[-1][0] or (in_quote and byte == ord("\n"))):
                awaited.pop()
            elif byte in CLOSING and not in_quote:
                awaited.append((CLOSING[byte], index))
            elif byte in QUOTES and not in_quote and not chr(before).isalnum():
                awaited.append((byte, index))
            before = byte
        found.append(awaited[-1][1] if awaited else None)
    return found


def targets_of(tokens: Tensor, table: Sequence[bytes], names: Iterable[str] = tuple(TARGETS)) -> dict[str, Tensor]:
    """tokens (B, T) -> the target keys of every query, bool (B, T, T), for each named score. table: the bytes of each token id."""
    pieces = [[table[token] for token in row] for row in tokens.tolist()]
    return {name: TARGETS[name](tokens, pieces) for name in names}


# --------------------------------------------------------------------------------------------------------- scores


def mass_on(weights: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """weights (B, H, T, T), target and visible bool (B, T, T) -> (H,): mean weight on the targets.

    The mean is over the queries that see a target; NaN if there are none.
    """
    target = target & visible
    counted = target.any(-1)  # (B, T)
    mass = torch.where(target[:, None], weights, 0).sum((0, 2, 3))
    return mass / counted.sum()


def score_layer(layer: LayerTrace, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scores of a layer's heads, (H,) each: `entropy_share`, and the weight on each of the targets, bool (B, T, T).

    `entropy_share` is the entropy divided by ln(visible keys), so that 1 means uniform attention. A layer with attention
    sinks also has `sink_mass`, the mean weight on the sink.
    """
    measured = statistics_of_scores(layer.scores, layer.weights, 0, layer.sink)
    per_head = measured.per_head()
    scores = {name: per_head[name].mean(0) for name in ("entropy_share", "sink_mass") if name in per_head}
    for name, target in targets.items():
        scores[name] = mass_on(layer.weights, target, layer.visible)
    return scores


def stack_layers(layers: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Scores (H,) of each layer -> scores (L, H) of the model, on the CPU."""
    layers = list(layers)
    return {name: torch.stack([layer[name] for layer in layers]).cpu() for name in layers[0]}


def score_model(model: GPT, tokens: Tensor, table: Sequence[bytes], names: Iterable[str]) -> dict[str, Tensor]:
    """The named scores (L, H) of a model over tokens (B, T). table: the bytes of every token id."""
    targets = targets_of(tokens, table, names)
    return stack_layers(score_layer(layer, targets) for layer in trace_layers(model, tokens))
