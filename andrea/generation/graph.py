"""A decoding step recorded once as a CUDA graph: one launch for each token instead of some hundreds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import KeyValueCache


@dataclass
class Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]  # where the graph reads: new tokens, and which of them are asked for
    logits: Tensor  # where it writes


class GraphedStep:
    """`step` (engine.py), recorded at the second call with a cache and a shape, and replayed from then on.

    The first call is made as it stands: it compiles, chooses kernels and takes memory, none of which may be recorded. The
    cache must have fixed shapes. The graph reads its length where the host writes it, and moves it on by itself.
    """

    def __init__(self, step) -> None:
        self.step = step
        self.cache: KeyValueCache | None = None
        self.recorded: dict[tuple, Recorded | None] = {}  # by shapes; None: called once

    def forget(self) -> None:
        self.cache, self.recorded = None, {}

    def __call__(self, model, tokens: Tensor, cache: KeyValueCache, at: Tensor | None = None) -> Tensor:
        if cache is not self.cache:
            self.cache, self.recorded = cache, {}
        inputs = (tokens,) if at is None else (tokens, at)
        shapes = tuple(each.shape for each in inputs)
        if shapes not in self.recorded:
            self.recorded[shapes] = None
            return self.step(model, tokens, cache, at)
        found = self.recorded[shapes]
        if found is None:
            kept = tuple(each.clone() for each in inputs)
            graph = torch.cuda.CUDAGraph()
            # Other threads (a checkpoint being written, say) may go on using the card.
            with torch.cuda.device(tokens.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = self.step(model, kept[0], cache, *kept[1:])
            found = self.recorded[shapes] = Recorded(graph, kept, logits)
        for place, each in zip(found.inputs, inputs, strict=True):
            place.copy_(each)
        found.graph.replay()
        return found.logits
