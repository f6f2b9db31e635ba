"""Continuous batching: a text is the same, bit for bit, alone and among texts that join and leave at any step."""

from __future__ import annotations

import dataclasses

import pytest
import test_packed_weights
import torch
from head_options import ALL_KINDS, SCORES
from test_engine import TOKENIZER, make_model

from andrea.generation import Engine, GeneratedToken, Request, Sampling
from andrea.generation.batching import MOST_READS, Batch, BatchedText
from andrea.generation.sample_command import BITS

CONFIGS = {
    name: dataclasses.replace(config, sequence_length=19) for name, config in test_packed_weights.CONFIGS.items()
}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.7, top_k=40, repetition_penalty=1.3),
    Sampling(top_p=0.8, min_p=0.01),
]


def in_batch(engine: Engine, n_text: int, arrivals: list[tuple[int, list[int], Request]]) -> list[list[GeneratedToken]]:
    """The tokens of texts that arrive in the given steps, each (step, prompt, request), and wait while the batch is full."""
    batch = Batch(engine, n_text)
    texts = [BatchedText(engine, prompt, request) for _, prompt, request in arrivals]
    found: list[list[GeneratedToken]] = [[] for _ in arrivals]
    waiting, n_step = sorted(range(len(texts)), key=lambda index: arrivals[index][0]), 0
    while waiting or batch.texts:
        while waiting and batch.idle and arrivals[waiting[0]][0] <= n_step:
            batch.join(texts[waiting.pop(0)])
        for made in batch.step():
            found[texts.index(made.text)].append(made.token)
        n_step += 1
    assert len(batch.idle) == n_text
    return found


def arrivals_of(n_text: int, seed: int) -> list[tuple[int, list[int], Request]]:
    draw = torch.Generator().manual_seed(seed)
    whole = lambda low, high: int(torch.randint(low, high, (), generator=draw))  # noqa: E731
    return [
        (
            whole(0, 40),
            [whole(0, 256) for _ in range(whole(1, 19))],
            Request(whole(1, 40), seed=whole(0, 99), stop=("e",) * whole(0, 2), sampling=SAMPLINGS[whole(0, 4)]),
        )
        for _ in range(n_text)
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4", "the model itself"])
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_that_join_and_leave_are_those_written_alone(name, precision):
    model = make_model(CONFIGS[name], test_packed_weights.ATTENTIONS[name])
    dtype = {"fp32": torch.float32, "the model itself": None}.get(precision, torch.bfloat16)
    engine = Engine(model, TOKENIZER, dtype=dtype, bits=BITS.get(precision))
    assert Batch(engine, 1).is_joint == (dtype is not None and CONFIGS[name].norm == "rmsnorm")
    arrivals = arrivals_of(19, seed=len(name))
    expected = [list(engine.stream(prompt, request)) for _, prompt, request in arrivals]
    assert in_batch(engine, 11, arrivals) == expected


@pytest.mark.parametrize("n_thread", [1, 3])
@pytest.mark.parametrize("n_text", [1, 2, 4, 7, 33])
def test_every_size_of_batch_and_number_of_threads_gives_the_same_numbers(n_text, n_thread):
    torch.set_num_threads(1)
    engine = Engine(make_model(CONFIGS["andrea"]), TOKENIZER, dtype=torch.float32)
    arrivals = [(0, prompt, request) for _, prompt, request in arrivals_of(33, seed=3)]
    expected = [list(engine.stream(prompt, request)) for _, prompt, request in arrivals]
    torch.set_num_threads(n_thread)
    assert in_batch(engine, n_text, arrivals) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["andrea", "convolution", "swiglu", ALL_KINDS, "value projections", SCORES])
def test_log_probabilities_are_the_same_to_the_last_bit_in_every_size_of_batch(name, precision):
    """Texts would hide a difference in the last bits."""
    model = make_model(CONFIGS[name], test_packed_weights.ATTENTIONS[name])
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    engine = Engine(model, TOKENIZER, dtype=dtype, bits=BITS.get(precision))
    found = []
    for n_text in (1, 3, 4, 21):
        batch, texts = Batch(engine, n_text), []
        scores: dict[int, list] = {index: [] for index in range(21)}
        while batch.texts or len(texts) < 21:
            while batch.idle and len(texts) < 21:
                texts.append(BatchedText(engine, [len(texts), 7], Request(17, seed=len(texts)), n_likeliest=257))
                batch.join(texts[-1])
            for made in batch.step():
                scores[texts.index(made.text)].append(made.score)
        found.append(scores)
    assert all(scores == found[0] for scores in found[1:])


def test_a_text_that_leaves_changes_no_other():
    engine = Engine(make_model(CONFIGS["andrea"]), TOKENIZER, dtype=torch.float32)
    requests = [Request(30, seed=seed) for seed in range(3)]
    batch = Batch(engine, 3)
    texts = [BatchedText(engine, [seed, 2, 3], request) for seed, request in enumerate(requests)]
    for text in texts:
        batch.join(text)
    found = {text: [] for text in texts}
    for n_step in range(40):
        if n_step == 7:
            batch.leave(texts[1])
            batch.leave(texts[1])  # again: nothing happens
        for made in batch.step():
            found[made.text].append(made.token.token)
    for text, request in zip(texts, requests, strict=True):
        expected = [token.token for token in engine.stream([request.seed, 2, 3], request)]
        assert found[text] == (expected if text is not texts[1] else expected[: len(found[text])])
    assert 0 < len(found[texts[1]]) < 8 and len(batch.idle) == 3


def test_windows_are_read_first_and_none_waits_for_ever():
    engine = Engine(
        make_model(dataclasses.replace(CONFIGS["andrea"], sequence_length=3)), TOKENIZER, dtype=torch.float32
    )
    batch = Batch(engine, MOST_READS + 2)
    texts = [BatchedText(engine, [1, 2], Request(20)) for _ in range(MOST_READS + 2)]
    for text in texts:
        batch.join(text)
    for text in texts[:MOST_READS]:
        assert [made.text for made in batch.step()] == [text]
    assert [made.text for made in batch.step()] == texts[:MOST_READS]
    assert [made.text for made in batch.step()] == [texts[MOST_READS]]
    n_step = 0
    while batch.texts:
        batch.step()
        n_step += 1
        assert n_step < 140
    assert all(text.has_ended for text in texts)


def test_scores_that_are_not_finite_end_their_text_alone():
    model = make_model(CONFIGS["andrea"])
    with torch.no_grad():
        model.embedding.weight[5] = torch.inf
    engine = Engine(model, TOKENIZER, dtype=torch.float32)
    batch = Batch(engine, 2)
    good, bad = BatchedText(engine, [1, 2], Request(1)), BatchedText(engine, [5, 5], Request(9))
    batch.join(good)
    batch.join(bad)
    made = {each.text: each for each in batch.step() + batch.step()}
    assert made[bad].error is not None and made[bad].token is None
    assert made[good].error is None and batch.texts == []


def test_scores_are_the_model_s_whatever_the_sampling():
    model = make_model(CONFIGS["andrea"])
    engine = Engine(model, TOKENIZER, dtype=torch.float32)
    batch = Batch(engine, 1)
    batch.join(BatchedText(engine, [3, 4, 5], Request(1, sampling=Sampling(temperature=0.3, top_k=2)), n_likeliest=3))
    (made,) = batch.step()
    exact = model(torch.tensor([[3, 4, 5]]))
    nats = model.logits(exact)[0, -1].log_softmax(-1).detach()
    assert made.score.nats == pytest.approx(float(nats[made.token.token]), abs=1e-5)
    assert [token for token, _ in made.score.likeliest] == nats.topk(3).indices.tolist()
