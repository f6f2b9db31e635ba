"""The parts of scores and of logits add up to them, and path patching equals a forward pass with one input changed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import CASES, TOKENIZER, hand_made, make, prompt_tokens
from torch import Tensor, nn

from andrea.attention import Compatibility
from andrea.config import ModelConfig, group_config
from andrea.insight.lens.attribution import (
    KINDS,
    Part,
    ScoreParts,
    as_shares,
    head_effects,
    largest_pairs,
    logit_parts,
    parts_of,
    read_arrays,
    score_parts,
    written_parts,
)
from andrea.insight.lens.trace import LayerTrace, trace_layers
from andrea.model.gpt import GPT
from andrea.model.lora import merge

IMPORTED = {  # the shapes of other families' layers, as `andrea import` writes them
    "GPT-2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": True},
    "Llama": {"n_kv_head": 1, "mlp": "swiglu", "rotary_scaling": (8.0, 1.0, 4.0, 20.0), "d_head": 8},
    "Qwen3": {"n_kv_head": 1, "mlp": "swiglu", "qk_norm": "learned", "d_head": 14},
    "Pythia": {"parallel_residual": True, "rotary_share": 0.34, "norm": "layernorm", "mlp": "gelu_exact", "bias": True},
}
PLAIN = {"qk_norm": False, "logit_softcap": None}
FURTHER = {f"as {name}": (PLAIN | changes, {}) for name, changes in IMPORTED.items()} | {
    "pairs of tokens, a convolution, documents": (
        {"bigram_rows": 37, "qkv_convolution": 3, "value_residual": True},
        {"across_documents": False},
    ),
    "two heads of keys for six of queries": ({"n_head": 6, "n_kv_head": 2, "d_head": 6}, {}),
    "low-rank changes": ({"lora_rank": 3, "bias": True, "n_kv_head": 1}, {}),
    "layer norm, cosine, a convolution": (
        {"norm": "layernorm", "bias": True, "qkv_convolution": 2, "qk_norm": False},
        {"compatibility": "cosine"},
    ),
}
ALL = CASES | FURTHER
BILINEAR = {name: case for name, case in ALL.items() if not name.startswith("additive")}
SCORE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}  # of a sum, relative to the layer's largest score


class Explained:
    """A model's traces and the parts of its stream."""

    def __init__(self, model: GPT, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.layers: list[LayerTrace] = list(trace_layers(model, tokens))
        with torch.no_grad():
            self.parts = list(written_parts(model, tokens, self.layers))

    @torch.no_grad()
    def scores(self, layer: int) -> ScoreParts | None:
        return score_parts(self.model, self.layers, self.parts, layer, range(self.model.config.n_head))

    @torch.no_grad()
    def effects(self, layer: int) -> Tensor:
        return head_effects(self.model, self.layers, self.parts, layer)


def draw_biases_and_factors(model: GPT) -> None:
    """A bias, a norm's weight, or a factor that starts as zero or one would hide a mistake."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith(("lora_a", "lora_b")):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def model_of(case: str, dtype: torch.dtype = torch.float32) -> GPT:
    model = make(*ALL[case])
    draw_biases_and_factors(model)
    return merge(model).to(dtype)


def prompt_of_two_documents() -> Tensor:
    tokens = prompt_tokens()
    tokens[0, 9] = TOKENIZER.end_of_text
    return tokens


def assert_pairs_are_the_scores(explained: Explained) -> None:
    """Every cell of every head: the pairs, their sum, and the score after what comes after the sum."""
    model, tokens = explained.model, explained.tokens
    n_part, n_mixed = len(parts_of(model)), model.config.qkv_convolution or 1
    position = torch.arange(tokens.shape[1])
    for index, layer in enumerate(explained.layers):
        found = explained.scores(index)
        written = n_part - (len(explained.layers) - index) * (model.config.n_head + 1)
        assert len(found.query) == written * n_mixed + 1
        sums = [sum_of_pairs(found.query[:, head], found.key[:, head]) for head in range(model.config.n_head)]
        summed = torch.stack(sums)[None]  # (1, H, T, T)
        expected = layer.query @ layer.key.mT
        tolerance = SCORE_TOLERANCE[summed.dtype] * expected.abs().max()
        assert (summed - expected).abs().max() <= tolerance
        modifiers = model.blocks[index].attention.modifiers
        if modifiers is not None:
            summed = modifiers.modified(summed, position[:, None], position)
        visible = layer.scores > -torch.inf
        assert (summed - layer.scores)[visible].abs().max() <= 2 * tolerance


def sum_of_pairs(query: Tensor, key: Tensor) -> Tensor:
    """(R, T, N) each -> (T, T): the sum over all pairs of rows, each pair computed alone, one row of the query at a time."""
    return sum((each @ key.mT).sum(0) for each in query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", BILINEAR)
def test_the_pairs_of_parts_sum_to_every_score(case: str, dtype: torch.dtype) -> None:
    assert_pairs_are_the_scores(Explained(model_of(case, dtype), prompt_of_two_documents()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("preset", ["andrea-nano", "andrea-12m"])
def test_the_pairs_of_parts_sum_to_every_score_at_the_shape_of_a_preset(preset: str, dtype: torch.dtype) -> None:
    config = dataclasses.replace(group_config("model", preset), bigram_rows=512)
    model = make({field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)})
    draw_biases_and_factors(model)
    assert_pairs_are_the_scores(Explained(model.to(dtype), prompt_tokens("abc abc")))


@pytest.mark.parametrize("case", ALL)
def test_the_parts_of_a_logit_sum_to_it(case: str) -> None:
    explained = Explained(model_of(case, torch.float64), prompt_of_two_documents())
    model, last = explained.model, explained.layers[-1]
    candidates = torch.randint(TOKENIZER.n_vocab, (explained.tokens.shape[1], 3))
    found = logit_parts(model, last, explained.parts, candidates)
    assert len(found) == len(parts_of(model)) + 1
    expected = (model.final_norm(last.after)[0] @ model.head_weight.T).gather(-1, candidates)
    torch.testing.assert_close(found.sum(0), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", ["GPT-2", "scalar gates, fixed exclusion"])
def test_a_heads_part_of_a_logit_is_what_its_output_adds(case: str) -> None:
    explained = Explained(model_of(case if case in ALL else f"as {case}"), prompt_tokens())
    model, last = explained.model, explained.layers[-1]
    head = parts_of(model).index(Part("head", 1, 3))
    candidates = torch.arange(10).repeat(explained.tokens.shape[1], 1)
    found = logit_parts(model, last, explained.parts, candidates)[head]
    written = explained.layers[1].written[0, 3] @ model.blocks[1].attention.output_by_head[3].T
    centred = written - written.mean(-1, keepdim=True) if isinstance(model.final_norm, nn.LayerNorm) else written
    x = last.after[0]
    deviation = x.std(-1, correction=0) if isinstance(model.final_norm, nn.LayerNorm) else x.square().mean(-1).sqrt()
    expected = (centred / deviation[:, None] * model.final_norm.weight) @ model.head_weight[:10].T
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------- functions that are no sums


class Doubled(Compatibility):
    """Linear, so its scores are sums over pairs."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return 2 * query @ key.mT

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * query, key


class Rectified(Doubled):
    """A dot product, but of vectors that are no linear functions of the query."""

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu(), key


class Shifted(Doubled):
    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key + 1


class Distance(Compatibility):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return -torch.cdist(query, key)


@pytest.mark.parametrize("function", [Rectified, Shifted, Distance])
def test_a_function_of_the_users_that_is_not_bilinear_has_no_parts(function: type[Compatibility]) -> None:
    model = make({"position": "learned"})
    for block in model.blocks:
        block.attention.compatibility = function()
    assert Explained(model, prompt_tokens()).scores(1) is None


def test_a_linear_function_of_the_users_has_parts() -> None:
    model = make()
    for block in model.blocks:
        block.attention.compatibility = Doubled()
    assert_pairs_are_the_scores(Explained(model, prompt_tokens()))


@pytest.mark.parametrize("case", ["additive", "additive with ALiBi"])
def test_the_additive_function_has_no_parts(case: str) -> None:
    explained = Explained(model_of(case), prompt_tokens())
    assert explained.scores(0) is None and explained.scores(2) is None


# ------------------------------------------------------------------------------------------------------- largest pairs


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_the_largest_pairs_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("andrea.insight.lens.attribution.PAIRS_AT_ONCE", at_once)
    query, key = torch.randn(2, 13, 7, 3).unbind()
    keys = torch.tensor([[0, 2], [1, 0], [6, 5], [3, 1], [2, 4], [5, 0], [0, 6]])
    found = largest_pairs(query, key, keys, 5)
    for i in range(7):
        for place, j in enumerate(keys[i].tolist()):
            pairs = query[:, i] @ key[:, j].T  # (13, 13); the last row and column are the biases
            without = pairs[:-1, :-1].flatten()
            order = without.abs().argsort(descending=True)[:5]
            torch.testing.assert_close(found.values[i, place], without[order])
            assert (found.rows[i, place] == torch.stack((order // 12, order % 12), -1)).all()
            torch.testing.assert_close(found.biases[i, place], pairs.sum() - without.sum(), atol=1e-5, rtol=1e-5)


def test_few_parts_have_few_pairs() -> None:
    found = largest_pairs(torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.zeros(4, 1, dtype=torch.int64), 8)
    assert found.values.shape == (4, 1, 1)


def test_shares_err_by_little_and_zeros_stay_zero() -> None:
    numbers = torch.randn(50, 8) * torch.logspace(-30, 30, 50)[:, None]
    numbers[7] = 0
    shares, largest = as_shares(numbers)
    back = torch.from_numpy(shares) * torch.from_numpy(largest)[:, None].double() / 32767
    assert ((back - numbers).abs() <= 1.6e-5 * numbers.abs().amax(-1, keepdim=True)).all() and not shares[7].any()


# --------------------------------------------------------------------------------------------------------- head to head


def normed_with_scale_of(norm: nn.Module, x: Tensor, removed: Tensor) -> Tensor:
    """The norm of x - removed, with the scale that the norm has for x."""
    if isinstance(norm, nn.LayerNorm):
        less, bias = x - removed, 0 if norm.bias is None else norm.bias
        deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return (less - less.mean(-1, keepdim=True)) / deviation * norm.weight + bias
    return (x - removed) / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def written_without(explained: Explained, source: tuple[int, int], layer: int, kind: str) -> Tensor:
    """What W_O of `layer` is applied to, (T, H, D), in a forward pass of the model whose queries, keys or values in that
    layer read a stream without what the head `source` has written, but with its norm's scale."""
    model, block = explained.model, explained.model.blocks[layer]
    of_source, d_head = model.blocks[source[0]].attention, model.config.head_width
    only = torch.zeros_like(of_source.merged(explained.layers[source[0]].written))
    only[..., source[1] * d_head : (source[1] + 1) * d_head] = explained.layers[source[0]].written[:, source[1]]
    removed = of_source.output(only) - of_source.output(torch.zeros_like(only))
    changed = normed_with_scale_of(block.attention_norm, explained.layers[layer].before, removed)
    seen = []
    hooks = [
        getattr(block.attention, kind).register_forward_pre_hook(lambda module, given: (changed,)),
        block.attention.output.register_forward_pre_hook(lambda module, given: seen.append(given[0])),
    ]
    model(explained.tokens)
    for hook in hooks:
        hook.remove()
    return seen[0][0].unflatten(-1, (-1, d_head))


@pytest.mark.parametrize("case", ALL)
def test_path_patching_equals_a_forward_pass_with_one_input_changed(case: str) -> None:
    explained = Explained(model_of(case), prompt_of_two_documents())
    model, layer = explained.model, 2
    found = explained.effects(layer)
    n_head = model.config.n_head
    assert found.shape == (3, 2 * n_head, n_head)
    if not any(word in case for word in ("additive", "cosine")):
        assert found.max() > 0.05
    whole = explained.layers[layer].written[0].transpose(0, 1)  # (T, H, D)
    weight = model.blocks[layer].attention.output_by_head
    for kind in KINDS:
        for source in ((0, 3), (1, 0)):
            change = written_without(explained, source, layer, kind) - whole
            lengths = [torch.einsum("hmd,thd->htm", weight, each).flatten(1).norm(dim=-1) for each in (change, whole)]
            patched = found[KINDS.index(kind), n_head * source[0] + source[1]]
            torch.testing.assert_close(patched, lengths[0] / lengths[1], atol=2e-4, rtol=2e-3)


def test_patching_in_small_batches_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = Explained(make(), prompt_tokens())
    together = explained.effects(2)
    monkeypatch.setattr("andrea.insight.lens.attribution.CELLS_AT_ONCE", 1)
    torch.testing.assert_close(explained.effects(2), together, atol=1e-5, rtol=1e-4)


def test_the_strongest_reads_come_first() -> None:
    effects, names = [torch.rand(3, 5, 5), torch.rand(3, 10, 5)], ("sources", "readers", "kinds", "effects")
    arrays = read_arrays(effects)
    assert len(arrays["effects"]) == 3 * 5 * (5 + 6) and (arrays["effects"][:-1] >= arrays["effects"][1:]).all()
    for source, reader, kind, effect in zip(*(arrays[name].tolist() for name in names), strict=True):
        assert effects[reader // 5 - 1][kind, source, reader % 5] == pytest.approx(effect)


def copying_by_hand() -> GPT:
    """The circuit of `hand_made`, whose head 1.0 also writes the token that it finds."""
    model = hand_made()
    induction, n_vocab = model.blocks[1].attention, TOKENIZER.n_vocab
    induction.value.weight[:n_vocab, :n_vocab] = torch.eye(n_vocab)
    induction.output.weight[:n_vocab, :n_vocab] = torch.eye(n_vocab)
    return model


def test_the_induction_circuit_made_by_hand_is_found() -> None:
    """Head 1.0 looks at what followed the earlier copy of its token, because head 0.0 wrote it into the key."""
    explained = Explained(copying_by_hand(), prompt_tokens("abcdeabcde"))
    effects = explained.effects(1)  # (3, 3, 3)
    kind, source, reader = torch.unravel_index(effects.argmax(), effects.shape)
    assert (KINDS[kind], int(source), int(reader)) == ("key", 0, 0) and effects.max() > 0.5
    assert effects.flatten().topk(2).values[1] < 0.05
    scores, parts = explained.scores(1), parts_of(explained.model)
    query, key = 6, 2  # the second 'a', and the 'b' after the first
    found = largest_pairs(scores.query[:, 0], scores.key[:, 0], torch.full((11, 1), key), 1)
    assert [parts[row] for row in found.rows[query, 0, 0].tolist()] == [Part("token"), Part("head", 0, 0)]
    score = explained.layers[1].query[0, 0, query] @ explained.layers[1].key[0, 0, key]
    torch.testing.assert_close(found.values[query, 0, 0], score, atol=0, rtol=0.01)
