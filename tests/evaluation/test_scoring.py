"""Log-probabilities of continuations, with and without a shared context, against the model's own logits."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_checkpoint import CONFIG, make_model

from andrea.config import UserError
from andrea.evaluation import scoring
from andrea.evaluation.scoring import Score, Scorer

T = CONFIG.sequence_length
GENERATOR = torch.Generator().manual_seed(3)


def ids(count: int) -> list[int]:
    return torch.randint(0, 257, (count,), generator=GENERATOR).tolist()


def expected(gpt, context: list[int], continuation: list[int]) -> Score:
    """One request at a time, from the logits of the whole row."""
    tokens = torch.tensor([*context, *continuation][-(T + 1) :])
    with torch.no_grad():
        logits = gpt.logits(gpt(tokens[None, :-1]))[0, -len(continuation) :].double()
    targets = tokens[-len(continuation) :]
    nats = logits.log_softmax(-1).gather(-1, targets[:, None]).sum()
    return Score(float(nats), bool((logits.argmax(-1) == targets).all()))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("fewest_shared", [2, 10**6])
def test_scores_are_those_of_the_model(batch_size: int, fewest_shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "FEWEST_SHARED", fewest_shared)
    gpt, shared = make_model().eval(), ids(11)
    requests = [(ids(n), ids(k)) for n, k in ((1, 1), (7, 3), (17, 5), (1, T))]
    requests += [(shared, ids(k)) for k in (1, 2, 7)]
    done = []
    found = Scorer(gpt, batch_size).score(requests, done.append)
    for score, (context, continuation) in zip(found, requests, strict=True):
        assert score.nats == pytest.approx(expected(gpt, context, continuation).nats, abs=1e-4)
    assert sum(done) == len(requests)


def test_the_likeliest_continuation_is_greedy_and_another_is_not() -> None:
    gpt, context = make_model().eval(), ids(5)
    with torch.no_grad():
        likeliest = int(gpt.logits(gpt(torch.tensor([context])))[0, -1].argmax())
    found = Scorer(gpt, 4).score([(context, [likeliest]), (context, [(likeliest + 1) % 257])])
    assert [score.is_greedy for score in found] == [True, False]
    assert 0 > found[0].nats > found[1].nats and found[0].nats >= -math.log(257)


def test_a_long_context_loses_its_first_tokens_and_is_counted() -> None:
    gpt, context, continuation = make_model().eval(), ids(T + 9), ids(4)
    scorer = Scorer(gpt, 2)
    (found,) = scorer.score([(context, continuation)])
    assert found.nats == pytest.approx(expected(gpt, context[-(T - 3) :], continuation).nats, abs=1e-5)
    assert scorer.n_cut == 1


@pytest.mark.parametrize("count", [0, T + 1])
def test_a_continuation_that_cannot_be_predicted_at_once_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"has {count} tokens.*sequence_length={T}"):
        Scorer(make_model(), 2).score([(ids(3), ids(count))])
