"""Measures every head on one prompt, for the lens page.

T tokens, L layers, H heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from andrea.insight.lens.effects import next_log_probabilities
from andrea.insight.lens.head_names import NAMES, names_of, probe_scores
from andrea.insight.lens.scores import score_layer, stack_layers, targets_of
from andrea.insight.lens.trace import LayerTrace, trace_layers
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

MAP_SIDE = 32  # most rows and columns of a head's small map

Head = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Measurements:
    """Measurements on one prompt. Only small maps are kept: full maps (T, T) would need 600 MB at T = 1024."""

    tokens: Tensor  # (1, T)
    layers: list[LayerTrace]  # with empty scores and weights
    maps: np.ndarray  # (L, H, side, side) uint8: 255 times the square root of the largest weight of a tile
    scores: dict[str, Tensor]  # (L, H) each, on the prompt
    probed: dict[str, Tensor]  # (L, H) each, on the fixed texts that decide the names
    log_probabilities: Tensor  # (T, V): ln p of the next token at each position

    @property
    def heads(self) -> list[Head]:
        n_layer, n_head = self.maps.shape[:2]
        return [(layer, head) for layer in range(n_layer) for head in range(n_head)]

    @property
    def gates(self) -> Tensor | None:
        """The gate of every head for every token, (L, H, T), the mean over a head's channels; None without gates."""
        if self.layers[0].gate is None:
            return None
        return torch.stack([layer.gate[0].mean(-1) for layer in self.layers])

    @property
    def named(self) -> dict[Head, list[str]]:
        """The heads that have a name, with the scores that gave them their names."""
        names = {head: [name.score for name in names_of(self.probed, *head)] for head in self.heads}
        return {head: found for head, found in names.items() if found}

    def by_interest(self) -> list[Head]:
        """All heads, most interesting first.

        The interest of a head is the largest ratio between one of its scores and the threshold of the score's name.
        """

        def interest(head: Head) -> float:
            factors = [float(self.probed[name.score][head]) / name.threshold for name in NAMES]
            return max((factor for factor in factors if not math.isnan(factor)), default=0.0)

        return sorted(self.heads, key=interest, reverse=True)


@torch.no_grad()
def measure(model: GPT, tokenizer: Tokenizer, tokens: list[int], map_side: int = MAP_SIDE) -> Measurements:
    """Measure every head on a prompt of at least one token."""
    prompt = torch.tensor([tokens], device=model.embedding.weight.device)
    targets = targets_of(prompt, tokenizer.token_bytes())
    layers, maps, scores = [], [], []
    for layer in trace_layers(model, prompt):
        maps.append(small_maps(layer.weights[0], map_side))
        scores.append(score_layer(layer, targets))
        empty = layer.scores.new_empty(0)
        layers.append(dataclasses.replace(layer, scores=empty, weights=empty))
    return Measurements(
        tokens=prompt,
        layers=layers,
        maps=np.stack(maps),
        scores=stack_layers(scores),
        probed=probe_scores(model, tokenizer),
        log_probabilities=next_log_probabilities(model, layers[-1].after)[0],
    )


def small_maps(weights: Tensor, side: int) -> np.ndarray:
    """weights (H, T, T) -> maps (H, s, s) uint8, s = min(T, side): 255 · sqrt(largest weight in each tile)."""
    side = min(side, weights.shape[-1])
    largest = functional.adaptive_max_pool2d(weights[None], side)[0]
    return (255 * largest.clamp(0, 1).sqrt()).round().to(torch.uint8).cpu().numpy()
