"""Patching between two prompts, the logit lens, strongest examples, and the distance between two models' maps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_attribution import FURTHER
from tiny_models import CASES, PROMPT, TOKENIZER, hand_made, make, prompt_tokens
from torch import Tensor

from andrea.insight.lens import panels as panels_module
from andrea.insight.lens.interventions import cache_of, patch, patch_all
from andrea.insight.lens.panels import map_distances, strongest_examples
from andrea.insight.lens.trace import LayerTrace, logit_lens, trace_layers
from andrea.model.gpt import GPT
from andrea.text.shards import TokenStream

AGAINST = PROMPT.replace("abc) t", "xbz) t")  # other tokens at 11 and 13
ALL = CASES | FURTHER


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


class TwoRuns:
    """A model's runs of the prompt and of the second text."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.tokens, self.against = prompt_tokens(), prompt_tokens(AGAINST)
        self.layers: list[LayerTrace] = list(trace_layers(model, self.tokens))
        self.others: list[LayerTrace] = list(trace_layers(model, self.against))
        self.logits, self.logits_against = (
            model.logits(model(each)).float()[:, -1] for each in (self.tokens, self.against)
        )

    def places(self, value: bool) -> Tensor:
        return torch.full(self.tokens.shape, value)


@pytest.fixture(params=ALL.values(), ids=ALL.keys())
def runs(request) -> TwoRuns:
    return TwoRuns(make(*request.param))


def test_replacing_all_that_a_layer_reads_gives_the_second_texts_logits(runs: TwoRuns) -> None:
    for layer, (one, other) in enumerate(zip(runs.layers, runs.others, strict=True)):
        close(patch("stream", runs.model, one, other, layer, runs.places(True)), runs.logits_against)
    assert (runs.logits - runs.logits_against).abs().max() > 1e-3  # or the test could not fail


def test_replacing_nothing_gives_the_prompts_logits(runs: TwoRuns) -> None:
    nowhere = runs.places(False)
    of_heads = nowhere[:, None].expand(-1, runs.model.config.n_head, -1)
    for layer, (one, other) in enumerate(zip(runs.layers, runs.others, strict=True)):
        for kind, places in (("stream", nowhere), ("mlp", nowhere), ("heads", of_heads)):
            close(patch(kind, runs.model, one, other, layer, places), runs.logits)


def test_the_outputs_of_a_layer_replaced_one_after_the_other_give_what_follows_it(runs: TwoRuns) -> None:
    """The prompt's last layer, with attention's and the MLP's output of the second text, on the second text's stream."""
    model, last = runs.model, len(runs.layers) - 1
    one, other = runs.layers[last], runs.others[last]
    attention_only = patch(
        "heads", model, one, other, last, runs.places(True)[:, None].expand(-1, model.config.n_head, -1)
    )
    by_hand = one.before + model.blocks[last].attention.output(model.blocks[last].attention.merged(other.written))
    block = model.blocks[last]
    by_hand = by_hand + block.mlp(block.mlp_norm(one.before if block.parallel_residual else by_hand))
    close(attention_only, model.logits(model.final_norm(by_hand[:, -1])).float())


def test_a_position_replaced_in_the_embedding_is_a_replaced_token() -> None:
    model = make(*CASES["first layer's values"])
    runs = TwoRuns(model)
    found = patch_all(model, runs.layers, runs.others, torch.arange(TOKENIZER.n_vocab))
    for position in (11, 13):
        changed = runs.tokens.clone()
        changed[0, position] = runs.against[0, position]
        close(found["stream"][0, position], model.logits(model(changed)).float()[0, -1])
        assert (found["stream"][0, position] - runs.logits[0]).abs().max() > 1e-3
    close(found["stream"][0, 12], runs.logits[0])  # the same token in both


def test_all_parts_are_replaced_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea.insight.lens.interventions.NUMBERS_AT_ONCE", 2000)  # three copies run together
    model = make()
    runs = TwoRuns(model)
    compared = torch.tensor([7, 2, 250])
    found = patch_all(model, runs.layers, runs.others, compared)
    n_token = runs.tokens.shape[1]
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "stream": (3, n_token, 3), "attention": (3, n_token, 3), "mlp": (3, n_token, 3), "heads": (3, 5, 3), "whole": (2, 3)
    }  # fmt: skip
    close(found["whole"], torch.cat((runs.logits, runs.logits_against))[:, compared])
    one, other, place = runs.layers[1], runs.others[1], runs.places(False)
    place[0, 16] = True
    close(found["mlp"][1, 16], patch("mlp", model, one, other, 1, place)[0, compared])
    heads = place[:, None].expand(-1, 5, -1)
    close(found["attention"][1, 16], patch("heads", model, one, other, 1, heads)[0, compared])
    head = torch.zeros(1, 5, n_token, dtype=torch.bool)
    head[0, 3] = True
    close(found["heads"][1, 3], patch("heads", model, one, other, 1, head)[0, compared])


def test_positions_before_the_first_replaced_one_need_not_be_computed_again(runs: TwoRuns) -> None:
    prefix = cache_of(runs.model, runs.layers)
    places = torch.eye(runs.tokens.shape[1], dtype=torch.bool)[[13, 14, 20]]
    of_heads = places[:, None].expand(-1, runs.model.config.n_head, -1)
    for layer, (one, other) in enumerate(zip(runs.layers, runs.others, strict=True)):
        for kind, where in (("stream", places), ("mlp", places), ("heads", of_heads)):
            inputs = (kind, runs.model, one, other, layer, where)
            close(patch(*inputs, prefix), patch(*inputs))


def test_patching_finds_the_head_that_copies() -> None:
    """In `hand_made`, head 1.0 looks at the token after the earlier copy. Here it also writes that token to the logits."""
    model = hand_made()
    d_head = TOKENIZER.n_vocab
    attention, identity = model.blocks[1].attention, torch.eye(d_head)
    attention.value.weight[:d_head, :d_head] = identity
    attention.output.weight[:d_head, :d_head] = 9 * identity
    model.head.weight[:, :d_head] = identity
    tokens, against = prompt_tokens("ab cd a"), prompt_tokens("ax cd a")
    layers, others = (list(trace_layers(model, each)) for each in (tokens, against))
    found = patch_all(model, layers, others, torch.tensor([ord("b"), ord("x")]))
    moved = {name: each[..., 1] - each[..., 0] for name, each in found.items()}  # logit of x minus that of b
    shares = {
        name: (each - moved["whole"][0]) / (moved["whole"][1] - moved["whole"][0]) for name, each in moved.items()
    }
    expected = torch.zeros(2, 3)
    expected[1, 0] = 1
    torch.testing.assert_close(shares["heads"], expected, atol=1e-4, rtol=0)
    at_b, at_the_end = torch.zeros(2, 8), torch.zeros(2, 8)
    at_b[:, 2], at_the_end[1, 7] = 1, 1
    torch.testing.assert_close(shares["stream"], at_b, atol=1e-4, rtol=0)
    torch.testing.assert_close(shares["attention"], at_the_end, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ALL)
def test_the_logit_lens_ends_with_the_prediction_and_begins_with_the_embedding(case: str) -> None:
    model, tokens = make(*ALL[case]), prompt_tokens()
    layers = list(trace_layers(model, tokens))
    stages = list(logit_lens(model, layers))
    assert len(stages) == 7
    close(stages[-1], model.logits(model(tokens)).float().log_softmax(-1)[0])
    close(stages[0], model.logits(model.final_norm(model.embed(tokens))).float().log_softmax(-1)[0])
    block = model.blocks[1]
    kept: Callable = block.mlp.forward
    block.mlp.forward = lambda x: torch.zeros(*x.shape[:-1], model.config.d_model)
    ended, _ = block(layers[1].before, layers[1].shared)
    block.mlp.forward = kept
    close(stages[3], model.logits(model.final_norm(ended)).float().log_softmax(-1)[0])


@pytest.mark.parametrize("case", ["scaled_dot", "fewer key/value heads, biases", "scalar gates", "cap, ALiBi and sink"])
def test_examples_are_the_largest_cells_of_their_windows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels_module, "WINDOWS_AT_ONCE", 2)
    model = make(*CASES[case]) if case in CASES else make({}, {"gate": "scalar"})
    text = np.random.default_rng(1).integers(0, 256, 40 * 7 + 11).astype(np.uint16)
    found = strongest_examples(model, TokenStream([text]), TOKENIZER.end_of_text)
    assert found.windows.shape == (7, 41) and found.windows[2, 1:].tolist() == text[80:120].tolist()
    assert found.cells.shape == (15, 5, 3) and (found.windows[:, 0] == TOKENIZER.end_of_text).all()
    for n in (0, 8, 14):
        layer, head = divmod(n, 5)
        strongest = []
        for window in found.windows:
            trace = list(trace_layers(model, window[None]))[layer]
            added = trace.value[0, head] @ model.blocks[layer].attention.output_by_head[head].T
            cells = trace.weights[0, head] * added.norm(dim=-1)
            cells = cells if trace.gate is None else cells * trace.gate[0, head]
            strongest.append(cells[1:].max().item())
            if len(strongest) - 1 in found.cells[n, :, 0]:
                (at,) = (found.cells[n, :, 0] == len(strongest) - 1).nonzero()[0].tolist()
                _, query, key = found.cells[n, at].tolist()
                assert cells[query, key].item() == pytest.approx(strongest[-1], rel=1e-5)
                assert found.sizes[n, at, 0].item() == pytest.approx(
                    trace.weights[0, head, query, key].item(), rel=1e-5
                )
        expected = sorted(strongest, reverse=True)[:5]
        assert found.sizes[n, :, 1].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_large_model_reads_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    n_parameter = sum(parameter.numel() for parameter in model.blocks.parameters())
    monkeypatch.setattr(panels_module, "MOST_FLOPS", 2 * n_parameter * 85)
    found = strongest_examples(model, TokenStream([np.zeros(1000, np.uint16)]), TOKENIZER.end_of_text)
    assert found.windows.shape == (2, 41)
    short = strongest_examples(model, TokenStream([np.arange(9, dtype=np.uint16)]), TOKENIZER.end_of_text)
    assert short.windows.shape == (1, 10) and short.cells.shape == (15, 1, 3)


def test_the_distance_between_maps_is_the_weight_on_other_keys() -> None:
    one, other, tokens = make(), make(seed=4), prompt_tokens()
    assert map_distances(one, one, tokens).abs().max() == 0
    found = map_distances(one, other, tokens)
    a, b = (list(trace_layers(each, tokens))[2].weights[0, 1] for each in (one, other))
    more = (a - b).clamp(min=0).sum(-1).mean()  # what is on one key less is on others more
    assert found[2, 1].item() == pytest.approx(more.item(), rel=1e-5) and found.shape == (3, 5)
