"""When a step is recorded and when it is replayed, with a stand-in for CUDA graphs, which need a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from andrea.generation.engine import GraphedStep


class Card:
    """Records what a step computes, and computes it again in the same memory, as a CUDA graph does."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, model, tokens, cache, at=None):
        self.calls.append("step")
        self.inputs, self.logits = (tokens, at), model(tokens, at)
        return self.logits

    @contextlib.contextmanager
    def record(self, graph, capture_error_mode):
        yield
        inputs, logits = self.inputs, self.logits

        def replay():
            self.calls.append("replay")
            logits.copy_(model(*inputs))

        graph.replay = replay

    def take_calls(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def model(tokens, at):
    return 2.0 * tokens if at is None else 2.0 * tokens + at


@pytest.fixture
def card(monkeypatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {}))
    monkeypatch.setattr(torch.cuda, "graph", card.record)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return card


def test_the_second_call_records_and_later_calls_replay_with_their_own_inputs(card):
    graphed, cache = GraphedStep(card.step), object()
    for number, expected in enumerate((["step"], ["step", "replay"], ["replay"], ["replay"])):
        tokens = torch.tensor([[number, number + 5]])
        assert torch.equal(graphed(model, tokens, cache), 2.0 * tokens)
        assert card.take_calls() == expected


def test_each_shape_of_the_inputs_has_a_recording_of_its_own(card):
    graphed, cache = GraphedStep(card.step), object()
    inputs = [(torch.ones(1, 2), None), (torch.ones(2, 2), None), (torch.ones(1, 2), torch.ones(1, 1))]
    for expected in (["step"], ["step", "replay"], ["replay"]):
        for tokens, at in inputs:
            tokens = tokens * len(card.calls)
            assert torch.equal(graphed(model, tokens, cache, at), model(tokens, at))
            assert card.take_calls() == expected


@pytest.mark.parametrize("forgets", [False, True])
def test_another_cache_or_forgetting_begins_anew(card, forgets):
    graphed, cache = GraphedStep(card.step), object()
    for _ in range(3):
        graphed(model, torch.ones(1, 1), cache)
    card.take_calls()
    if forgets:
        graphed.forget()
    for expected in (["step"], ["step", "replay"], ["replay"]):
        graphed(model, torch.ones(1, 1), cache if forgets else card)
        assert card.take_calls() == expected
