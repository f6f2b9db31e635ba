"""What a layer of andrea-120m moves and launches on an H200, from the graphs that torch.compile makes for sm_90."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compiled_for_card import Graph, graphs_of
from torch import Tensor
from torch._subclasses import FakeTensorMode

from andrea.api.command_line import configure
from andrea.attention import SharedInputs, multihead
from andrea.config import RunConfig
from andrea.generation.engine import step
from andrea.model.gpt import GPT

pytestmark = [pytest.mark.slow, pytest.mark.untraced]
pytest.importorskip("triton")

SEQUENCES = 64  # of 1,024 tokens
GIGA = 1e9


def made(n_layer: int, *words: str) -> GPT:
    run = configure(RunConfig, "train", ["model=andrea-120m", "attention.implementation=triton", *words])
    return GPT(dataclasses.replace(run.model, n_layer=n_layer), run.attention, 50257, 0)


def layer_graphs() -> tuple[Graph, Graph]:
    """The forward and the backward graph of one block in training, in bf16."""
    with FakeTensorMode():
        model, x = made(1), torch.randn(SEQUENCES, 1024, 768, requires_grad=True)
        first = torch.randn(SEQUENCES, 1024, 12, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

        def block(x: Tensor, first: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                shared = SharedInputs(place=model.position.placer(1024, 0), first_value=first)
                return model.blocks[0](x, shared)[0]

        forward, backward = graphs_of(block, x, first)
    return forward, backward


def test_bytes_that_a_layer_moves_in_training(monkeypatch):
    """The operator of value mix, convolution, norm and rotation saves 2.6 to 2.8 GB. One pass too many over q, k and v or over
    what the MLP computes, 0.3 to 0.4 GB, would be seen here."""
    forward, backward = layer_graphs()
    assert forward.n_bytes < 5.0 * GIGA and backward.n_bytes < 8.6 * GIGA, (forward, backward)
    assert len(forward.launches) <= 15 and len(backward.launches) <= 21, (forward, backward)
    monkeypatch.setattr(multihead.MultiHeadAttention, "is_prepared_in_one_pass", lambda self, x, shared: False)
    readable = layer_graphs()
    assert all(
        own.n_bytes + 2.5 * GIGA < other.n_bytes for own, other in zip((forward, backward), readable, strict=True)
    )


def decoding_graph(n_layer: int) -> Graph:
    """Of one new token, whose weights and cache are bf16."""
    with torch.no_grad():
        model = made(n_layer).to(torch.bfloat16).requires_grad_(False)
        for block in model.blocks:
            block.attention.put_side_by_side()
        cache, tokens = model.make_cache(1, 1024, fixed_shapes=True), torch.zeros(1, 1, dtype=torch.int64)
        (graph,) = graphs_of(step, model, tokens, cache)
    return graph


def n_launches(graph: Graph) -> int:
    return len(graph.launches) + graph.launches.count("torch.ops.andrea.decoded_heads.default")  # it launches two


def test_launches_of_a_decoded_token(monkeypatch):
    """One more layer is four products, our two kernels, two norms and the squared ReLU. No weight is put beside another, and
    nothing of the cache is copied."""
    one, two = map(n_launches, map(decoding_graph, (1, 2)))
    assert two - one <= 9 and one <= 16, (one, two)
    monkeypatch.setattr(multihead.MultiHeadAttention, "is_decoded_in_one_pass", lambda self, x, shared, cache: False)
    readable = [n_launches(decoding_graph(n_layer)) for n_layer in (1, 2)]
    assert readable[1] - readable[0] >= 2 * (two - one), readable
