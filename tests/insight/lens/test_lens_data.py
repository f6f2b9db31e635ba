"""The data of the page (small maps, texts of tokens, loss changes), and the small page that training draws."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TOKENIZER, make, prompt_tokens

from andrea.insight.lens.interventions import ablate_heads
from andrea.insight.lens.lens import small_lens
from andrea.insight.lens.page import LensPage, Source, measure, small_maps, visible_text
from andrea.insight.lens.trace import next_log_probabilities, trace_layers


def test_small_maps_keep_the_strongest_cell() -> None:
    weights = torch.zeros(1, 9, 9)
    weights[0, 7, 2] = 0.25
    reduced = small_maps(weights, 3)
    assert reduced.shape == (1, 3, 3) and reduced[0, 2, 0] == round(255 * 0.5) and reduced.sum() == reduced[0, 2, 0]


def test_hidden_characters_are_shown() -> None:
    assert (
        visible_text(b" a\n\tb") == "␣a↵→b"
        and visible_text(b"\xe2\x80") == "⟨E2 80⟩"
        and visible_text(b"\x00") == "⟨00⟩"
    )


def test_the_loss_change_is_that_of_the_prompt() -> None:
    model, tokens = make(), prompt_tokens()
    measured = measure(model, TOKENIZER, tokens[0].tolist())
    page = LensPage(model, TOKENIZER, measured, Source("tiny", None, TOKENIZER.identity))
    arrays = dict(page.arrays_of([(1, 2)]))[1, 2]
    ((_, ablated),) = ablate_heads(model, tokens, 1, list(trace_layers(model, tokens))[1], [2])
    *_, last = trace_layers(model, tokens)
    actual = tokens[0, 1:, None]
    expected = (next_log_probabilities(model, last.after)[0, :-1] - ablated[:-1]).gather(-1, actual).mean()
    assert page.loss_change(arrays["ablated_candidates"][:, -1]) == pytest.approx(expected.item(), abs=1e-5)


def test_the_small_lens_leaves_the_model_as_it_was() -> None:
    model = make({"position": "learned"}).train().requires_grad_(True)
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        page = small_lens(model, TOKENIZER, "def main(argv):\n    return main(argv)")
    assert model.training and torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model.embedding.weight.grad, torch.ones_like(model.embedding.weight))
    assert len(page.encode()) <= 300_000 and page.count('id="data-') == 2 + 15
    assert page == small_lens(model, TOKENIZER, "def main(argv):\n    return main(argv)")


def test_the_small_lens_of_many_heads_stays_small() -> None:
    model = make({"d_model": 480, "n_head": 24, "n_layer": 16, "d_mlp": 8})
    page = small_lens(model, TOKENIZER, "x" * 100)
    assert len(page.encode()) <= 300_000
