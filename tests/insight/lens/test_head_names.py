"""Names of heads: which heads get one, and the fixed texts that decide."""

from __future__ import annotations

import math

import torch
from tiny_models import TOKENIZER, hand_made, make

from andrea.insight.lens.scores import NAMES, PASSAGE, names_of, probe_scores, repetition


def test_repetitions_fit_the_model() -> None:
    ordinary = set(TOKENIZER.encode(PASSAGE))
    for changes, attention, half in (
        ({}, {}, 20),
        ({"sequence_length": 300}, {}, len(ordinary)),
        ({}, {"window": 7}, 7),
    ):
        tokens = repetition(make(changes, attention), TOKENIZER)
        assert tokens.shape[1] == 1 + 2 * half
        assert torch.equal(tokens[:, 1 : 1 + half], tokens[:, 1 + half :])
        assert all(len(set(row)) == half and set(row) <= ordinary for row in tokens[:, 1 : 1 + half].tolist())


def test_heads_made_by_hand_are_named_and_others_are_not() -> None:
    model = hand_made()
    probed = probe_scores(model, TOKENIZER)
    named = {
        (layer, head): [name.title for name in names_of(probed, layer, head)] for layer in range(2) for head in range(3)
    }
    assert named.pop((0, 0)) == ["previous-token"]
    assert named.pop((1, 0)) == ["induction"]
    assert not any(named.values())


def test_random_heads_get_no_name() -> None:
    for seed in range(5):
        probed = probe_scores(make({"sequence_length": 200}, seed=seed), TOKENIZER)
        assert not any(names_of(probed, layer, head) for layer in range(3) for head in range(5))


def test_a_score_that_cannot_be_measured_gives_no_name() -> None:
    probed = {name.score: torch.full((1, 1), math.nan) for name in NAMES}
    assert names_of(probed, 0, 0) == []
