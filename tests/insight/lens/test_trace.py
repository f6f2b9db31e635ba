"""The traced forward pass, and what ablation and logit attribution compute from it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, CONFIG, TOKENIZER, make, prompt_tokens

from andrea.attention import attention_weights
from andrea.insight.lens.interventions import ablate_heads
from andrea.insight.lens.trace import LayerTrace, logit_attribution, trace_layers
from andrea.model.gpt import GPT


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def model(request) -> GPT:
    return make(*request.param)


def test_the_trace_ends_with_the_logits_of_the_model(model: GPT) -> None:
    tokens = prompt_tokens()
    tokens[0, 9] = TOKENIZER.end_of_text  # a second document, for the model that separates documents
    *_, last = trace_layers(model, tokens)
    torch.testing.assert_close(model.logits(model.final_norm(last.after)), model.logits(model(tokens)))


def test_weights_are_attention_weights_and_rows_sum_to_one(model: GPT) -> None:
    tokens = prompt_tokens()
    x, shared = model.block_inputs(tokens)
    first = next(iter(trace_layers(model, tokens)))
    attention = model.blocks[0].attention
    query, key, _, compatibility = attention.project(model.blocks[0].attention_norm(x), shared=shared)
    scoring = {"modifiers": attention.modifiers, "sink": attention.sink}
    expected = attention_weights(query, key, compatibility=compatibility, mask=attention.mask, **scoring)
    torch.testing.assert_close(first.weights, expected, atol=1e-6, rtol=1e-5)
    of_keys = 1 if first.sink is None else 1 - (first.sink[:, None] - log_sum_exp_of(first)).exp()
    torch.testing.assert_close(first.weights.sum(-1), of_keys * torch.ones_like(first.weights[..., 0]))


def log_sum_exp_of(layer: LayerTrace) -> torch.Tensor:
    """(B, H, T): of the keys' scores and the sink."""
    return torch.logaddexp(layer.scores.logsumexp(-1), layer.sink[:, None])


def test_ablating_a_head_equals_zeroing_its_slice_of_the_output_matrix(model: GPT) -> None:
    tokens = prompt_tokens()
    passes = list(trace_layers(model, tokens))
    for layer in (0, 2):
        found = dict(ablate_heads(model, tokens, layer, passes[layer], [1, 4]))
        for head, ablated in found.items():
            weight = model.blocks[layer].attention.output.weight
            kept, d_head = weight.clone(), model.config.head_width
            weight[:, head * d_head : (head + 1) * d_head] = 0
            expected = model.logits(model(tokens)).float().log_softmax(-1)[0]
            weight.copy_(kept)
            torch.testing.assert_close(ablated, expected, atol=1e-5, rtol=1e-5)
        assert (found[1] - found[4]).abs().max() > 1e-3


def test_ablating_in_small_batches_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make(), prompt_tokens()
    passes = list(trace_layers(model, tokens))
    together = dict(ablate_heads(model, tokens, 1, passes[1], range(5)))
    monkeypatch.setattr("andrea.insight.lens.interventions.LOGITS_AT_ONCE", 1)
    for head, ablated in ablate_heads(model, tokens, 1, passes[1], range(5)):
        torch.testing.assert_close(ablated, together[head], atol=1e-5, rtol=1e-5)


def test_logit_attribution_finds_the_largest_changes() -> None:
    model = make()
    vectors = torch.randn(7, CONFIG.head_width)
    ids, changes = logit_attribution(model, 1, 3, vectors, 2)
    full = model.head.weight @ (model.blocks[1].attention.output_by_head[3] @ vectors[4])
    order = full.argsort(descending=True)
    assert ids[4].tolist() == [*order[:2].tolist(), *order.flip(0)[:2].tolist()]
    torch.testing.assert_close(changes[4], full[ids[4]])


def test_the_parts_of_a_value_add_up_to_it(model: GPT) -> None:
    tokens = prompt_tokens()
    for block in model.blocks:
        block.attention.taps = None  # a convolution comes after the sum
    for block, layer in zip(model.blocks, trace_layers(model, tokens), strict=True):
        torch.testing.assert_close(sum(layer.value_parts.values()), layer.value)
        assert ("the first layer's" in layer.value_parts) == (block.attention.value_mix is not None)
        assert ("the value embedding" in layer.value_parts) == (block.attention.value_embedding is not None)
