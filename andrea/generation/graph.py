"""A decoding step recorded as a CUDA graph. Each token then needs one launch instead of several hundred."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import KeyValueCache


@dataclass
class Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]  # inputs of the graph: new tokens, and the indices whose logits are needed
    logits: Tensor  # output of the graph


class GraphedStep:
    """`step` of engine.py as a CUDA graph.

    The second call with the same cache and shapes records the graph, and later calls replay it. The first call is not
    recorded, because it compiles, chooses kernels and allocates memory. The cache must have fixed shapes. The graph
    itself reads and increases the cache's length, which is a tensor.
    """

    def __init__(self, step) -> None:
        self.step = step
        self.cache: KeyValueCache | None = None
        self.recorded: dict[tuple, Recorded | None] = {}  # by input shapes; None between the first and the second call

    def forget(self) -> None:
        """Release the recorded graphs, and with them the memory of their cache."""
        self.cache, self.recorded = None, {}

    def __call__(self, model, tokens: Tensor, cache: KeyValueCache, at: Tensor | None = None) -> Tensor:
        if cache is not self.cache:
            self.cache, self.recorded = cache, {}
        inputs = (tokens,) if at is None else (tokens, at)
        shapes = tuple(each.shape for each in inputs)
        if shapes not in self.recorded:
            self.recorded[shapes] = None
            return self.step(model, tokens, cache, at)
        recorded = self.recorded[shapes]
        if recorded is None:
            kept = tuple(each.clone() for each in inputs)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as one that writes a checkpoint, may use the GPU during the recording.
            with torch.cuda.device(tokens.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = self.step(model, kept[0], cache, *kept[1:])
            recorded = self.recorded[shapes] = Recorded(graph, kept, logits)
        for kept_input, each in zip(recorded.inputs, inputs, strict=True):
            kept_input.copy_(each)
        recorded.graph.replay()
        return recorded.logits
