"""Scores of heads: solved by hand, and equal to the figures that training logs."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import TOKENIZER, make, prompt_tokens

from andrea.insight.lens.scores import mass_on, open_at, score_layer, targets_of
from andrea.insight.lens.trace import trace_layers
from andrea.training.evaluation import probe


def test_masses_solved_by_hand() -> None:
    """Tokens a b a b, with weights that differ from each other."""
    tokens = torch.tensor([[0, 1, 0, 1]])
    weights = torch.tensor([[1.0, 0, 0, 0], [0.3, 0.7, 0, 0], [0.2, 0.5, 0.3, 0], [0.15, 0.2, 0.25, 0.4]])[None, None]
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    targets = targets_of(tokens, [b"a", b"b"])
    found = {name: mass_on(weights, target, visible).item() for name, target in targets.items()}
    assert found["previous_token"] == pytest.approx((0.3 + 0.5 + 0.25) / 3)
    assert found["first_token"] == pytest.approx((0.3 + 0.2 + 0.15) / 3)
    assert found["same_token"] == pytest.approx((0.2 + 0.2) / 2)  # queries 2 and 3
    assert found["induction"] == pytest.approx(
        (0.5 + 0.25) / 2
    )  # after the first a came b at 1, after the first b a at 2
    assert math.isnan(found["opener"])


def test_the_window_hides_targets() -> None:
    weights = torch.full((1, 1, 4, 4), 0.25)
    near = (torch.arange(4)[:, None] - torch.arange(4) < 2).tril()[None]
    first = targets_of(torch.tensor([[5, 6, 7, 8]]), [b""] * 9)["first_token"]
    assert mass_on(weights, first, near).item() == 0.25  # only query 1 still sees the first token


def test_scores_equal_those_that_training_logs() -> None:
    model, tokens = make(attention={"window": 7}), prompt_tokens()
    logged = probe(model, tokens).heads.figures()
    for layer, trace in enumerate(trace_layers(model, tokens)):
        scores = score_layer(trace, targets_of(tokens, TOKENIZER.token_bytes()))
        for name, here in (("previous_token_mass", "previous_token"), ("first_token_mass", "first_token")):
            torch.testing.assert_close(scores[here], logged[name][layer])
        torch.testing.assert_close(scores["entropy_share"], logged["entropy_share"][layer])


def openers_of(text: str) -> str:
    """For each character its innermost opener, or '.'."""
    return "".join("." if key is None else text[key] for key in open_at([character.encode() for character in text]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a(b[c]d)e", ".(([[((.."),
        ("f('(')x", ".(''(.."),
        ("don't (x)", "......((."),
        ('"it\'s" b', '"""""...'),
        ('"a\nb(c', '""..(('),
        (")a]", "..."),
    ],
)
def test_openers(text: str, expected: str) -> None:
    assert openers_of(text) == expected


def test_an_opener_just_before_the_query_does_not_count() -> None:
    tokens = torch.tensor([list(b"(ab)")])
    target = targets_of(tokens, TOKENIZER.token_bytes())["opener"]
    assert target.nonzero().tolist() == [[0, 2, 0]]
