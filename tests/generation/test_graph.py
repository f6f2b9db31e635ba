"""When a step is recorded and when it is replayed, with a stand-in for CUDA graphs, which need a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from test_engine import CONVOLVED, TOKENIZER, make_model

from andrea.config import UserError
from andrea.generation import Engine, Request, Sampling, engine
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


# ------------------------------------------------------------------------------------------- tokens fed back on the device


class StandIn:
    """A CUDA graph of a function, on a CPU: a replay calls it again, and writes into the same result."""

    def __init__(self, function, result) -> None:
        self.function, self.result = function, result

    def replay(self) -> None:
        self.result.copy_(self.function())


@pytest.fixture
def fed_back(monkeypatch):
    """Makes an engine as it is on a GPU, and its log: a "launch" per step, and a "wait" before a token is read."""
    log: list[str] = []

    class Event:
        def record(self):
            log.append("launch")

        def synchronize(self):
            log.append("wait")

    def recorded(function, device):
        result = torch.zeros(function.__self__.tokens.shape[0], dtype=torch.int64)
        log.append("recorded")
        return StandIn(function, result), result

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(engine, "recorded", recorded)

    def make(model, tokenizer) -> tuple[engine.Engine, list[str]]:
        made = engine.Engine(model, tokenizer)
        made.fixed_shapes = True
        made.step = GraphedStep(engine.step)
        monkeypatch.setattr(GraphedStep, "__call__", lambda self, *inputs: self.step(*inputs))
        return made, log

    return make


@pytest.fixture
def tiny_gpt():
    """A model with a convolution and bigrams, which keep more than keys and values, and its tokenizer."""
    return make_model(replace(CONVOLVED, sequence_length=16)), TOKENIZER


REQUESTS = [
    Request(9, sampling=Sampling(temperature=0)),
    Request(30, num_samples=3, seed=5, sampling=Sampling(0.8, repetition_penalty=1.3)),  # the window of 16 slides twice
    Request(12, num_samples=2, sampling=Sampling(1.0, top_k=9, top_p=0.9, min_p=0.01)),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_tokens_fed_back_on_the_device_are_those_that_the_host_chooses(request_, fed_back, tiny_gpt):
    model, tokenizer = tiny_gpt
    made, log = fed_back(model, tokenizer)
    prompt = [tokenizer.end_of_text, 3, 4, 3]
    expected = list(Engine(model, tokenizer).stream(prompt, request_))
    assert list(made.stream(prompt, request_)) == expected
    assert log.count("launch") > request_.max_new_tokens // 2 and log.count("recorded") == 1
    assert list(made.stream(prompt, request_)) == expected and log.count("recorded") == 1  # the graph serves again


def test_the_host_is_one_step_behind(fed_back, tiny_gpt):
    model, tokenizer = tiny_gpt
    made, log = fed_back(model, tokenizer)
    assert len(list(made.stream([tokenizer.end_of_text], Request(6, sampling=Sampling(temperature=0))))) == 6
    steps = [each for each in log if each != "recorded"]
    assert steps == ["launch"] + 4 * ["launch", "wait"] + ["wait"]  # the first token follows the prompt, by itself


def test_scores_that_are_not_finite_are_an_error_and_no_index(fed_back, tiny_gpt):
    """The next step has been launched when the host reads that a token is none: it must not read outside the embedding."""
    model, tokenizer = tiny_gpt
    made, log = fed_back(model, tokenizer)
    stream = made.stream([tokenizer.end_of_text], Request(8))
    next(stream), next(stream)
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        list(stream)
