"""LoRA's factors: what a layer computes, what is trained, and that a merged model is the same function."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from head_options import ALL_OPTIONS, draw_what_starts_alike
from planned_memory import plan_memory
from torch import nn

from andrea.config import group_config
from andrea.config.keys import choices
from andrea.generation import Engine, Request, Sampling
from andrea.model import GPT, initialise
from andrea.model.lora import (
    ALPHA,
    LowRankLinear,
    adapted_layers,
    initialise_factors,
    is_factor,
    merge,
    train_vocabulary,
)
from andrea.model.size import count_parameters, count_trained
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.loss.loss import training_loss_sum
from andrea.training.optimizer import group_parameters
from andrea.training.parallel.ranks import Parallel
from andrea.training.step import sampled_weights

V, T, RANK = 31, 13, 3
SIZES = {"d_model": 42, "n_layer": 2, "n_head": 3, "d_mlp": 37, "sequence_length": T}
TOKENS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(2))


def configs(preset: str = "andrea-nano", model: dict | None = None, attention: dict | None = None) -> tuple[Any, Any]:
    plain = group_config("model", preset)
    smaller = SIZES | {key: 1 for key in ("n_kv_head",) if getattr(plain, key)} | {"d_head": None}
    smaller |= {"bigram_rows": 29} if plain.bigram_rows else {}
    attending = group_config("attention", "scaled_dot", implementation="reference")
    return dataclasses.replace(plain, **(smaller | (model or {}))), dataclasses.replace(attending, **(attention or {}))


def make(
    rank: int = RANK, preset: str = "andrea-nano", model: dict | None = None, attention: dict | None = None
) -> GPT:
    """A model with weights that all differ, in which B is not zero any more."""
    gpt = GPT(*configs(preset, (model or {}) | {"lora_rank": rank}, attention), V)
    initialise(gpt, torch.Generator().manual_seed(3))
    draw_what_starts_alike(gpt)
    initialise_factors(gpt, torch.Generator().manual_seed(4))
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if name.endswith(".lora_b"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return gpt.eval()


def logits(gpt: GPT) -> torch.Tensor:
    with torch.no_grad():
        return gpt.logits(gpt(TOKENS))


def test_a_layer_adds_the_product_of_its_factors_by_hand() -> None:
    layer = nn.Linear(2, 3)
    low_rank = LowRankLinear(layer, rank=2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]]))
        layer.bias.copy_(torch.tensor([0.0, 0.0, 10.0]))
        low_rank.lora_a.copy_(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        low_rank.lora_b.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    # x = (5, 7): W x + b = (19, 7, 25); A x = (12, 14); B A x = (12, 14, 0); α / r = 16 / 2
    expected = torch.tensor([19 + 8 * 12.0, 7 + 8 * 14.0, 25.0])
    assert ALPHA == 16 and torch.equal(low_rank(torch.tensor([5.0, 7.0])), expected)


def test_at_first_the_function_is_that_of_the_weights() -> None:
    """B is zero, A is within 1 / sqrt(n_in), differs by layer and is a function of the seed."""
    plain = GPT(*configs(), V)
    initialise(plain, torch.Generator().manual_seed(3))
    gpt = GPT(*configs(model={"lora_rank": RANK}), V)
    gpt.load_state_dict(plain.state_dict(), strict=False)
    initialise_factors(gpt, torch.Generator().manual_seed(4))
    assert torch.equal(logits(gpt.eval()), logits(plain.eval()))
    drawn = [layer.lora_a.detach() for _, _, layer in adapted_layers(gpt)]
    for a in drawn:
        bound = a.shape[1] ** -0.5
        assert 0.5 * bound < float(a.abs().max()) <= bound and float(a.min()) < 0 < float(a.max())
    assert not torch.equal(drawn[0], drawn[1])
    initialise_factors(gpt, torch.Generator().manual_seed(4))
    assert torch.equal(drawn[0], next(adapted_layers(gpt))[2].lora_a)


MLPS = {"gelu": {"mlp": "gelu", "bias": True, "norm": "layernorm"}, "untied": {"tied_head": False}}
VARIANTS = (
    [pytest.param(preset, {}, {}, id=preset) for preset in choices("model")]
    + [pytest.param("andrea-nano", *changes, id=name) for name, changes in ALL_OPTIONS.items()]
    + [pytest.param("andrea-nano", changes, {}, id=name) for name, changes in MLPS.items()]
    + [
        pytest.param("andrea-nano", {"position": "learned"}, {"compatibility": each}, id=each)
        for each in ("dot", "bilinear", "cosine", "additive")
    ]
    + [pytest.param("nano-llama", {"n_head": 6, "n_kv_head": 2, "d_head": 8, "lora_rank": 61}, {}, id="high rank")]
)


@pytest.mark.parametrize(("preset", "model", "attention"), VARIANTS)
def test_the_merged_model_is_plain_and_the_same_function(preset: str, model: dict, attention: dict) -> None:
    """To 1e-6 of the logits, in fp32; also with a rank above that of every matrix."""
    changes = dict(model)
    gpt = make(changes.pop("lora_rank", RANK), preset, changes, attention)
    before = {name: weight.clone() for name, weight in gpt.state_dict().items()}
    merged = merge(gpt)
    ours, theirs = logits(gpt), logits(merged)
    assert float((ours - theirs).norm() / ours.norm()) < 1e-6
    without = GPT(dataclasses.replace(gpt.config, lora_rank=0), configs(attention=attention)[1], V)
    without.load_state_dict({name: weight for name, weight in before.items() if not is_factor(name)})
    assert float((ours - logits(without.eval())).norm() / ours.norm()) > 1e-3  # the factors do something
    assert merged.state_dict().keys() == without.state_dict().keys() and merged.config == without.config
    assert not list(adapted_layers(merged)) and merge(merged) is merged
    assert all(torch.equal(weight, before[name]) for name, weight in gpt.state_dict().items())


@pytest.mark.parametrize("preset", choices("model"))
def test_only_the_factors_of_attention_and_mlp_are_trained(preset: str) -> None:
    gated = {"gate": "elementwise"}  # a matrix of attention without factors
    gpt = make(preset=preset, attention=gated)
    config = gpt.config
    of_q, of_kv = config.d_attended, (config.n_kv_head or config.n_head) * config.head_width
    shapes = [
        (of_q, 42),
        (of_kv, 42),
        (of_kv, 42),
        (42, of_q),
        *[(37, 42)] * (2 if config.mlp == "swiglu" else 1),
        (42, 37),
    ]
    expected = 2 * sum(RANK * (n_out + n_in) for n_out, n_in in shapes)
    assert count_trained(*configs(preset, {"lora_rank": RANK}, gated), V) == expected
    plain = count_parameters(*configs(preset, {}, gated), V)
    assert count_parameters(config, configs(preset, {}, gated)[1], V).total == plain.total + expected
    assert count_trained(*configs(preset, {}, gated), V) == plain.total
    training_loss_sum(gpt, gpt(TOKENS), TOKENS, "fp32").backward()
    with_gradient = {name for name, each in gpt.named_parameters() if each.grad is not None and bool(each.grad.any())}
    assert with_gradient == {name for name in gpt.state_dict() if is_factor(name)}
    groups = group_parameters(dict(gpt.named_parameters()))
    assert groups["factor"].keys() == with_gradient and not any(groups[name] for name in groups if name != "factor")


@pytest.mark.parametrize("tied", [True, False])
def test_an_added_vocabulary_is_trained_too(tied: bool) -> None:
    gpt = make(model={"tied_head": tied})
    train_vocabulary(gpt)
    training_loss_sum(gpt, gpt(TOKENS), TOKENS, "fp32").backward()
    others = {name for name, each in gpt.named_parameters() if each.grad is not None and not is_factor(name)}
    assert others == {"embedding.weight"} | (set() if tied else {"head.weight"})
    groups = group_parameters(dict(gpt.named_parameters()))
    assert list(groups["embedding"]) == ["embedding.weight"] and list(groups["head"]) == (
        [] if tied else ["head.weight"]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_head_passes_the_same_gradient_on(precision: str) -> None:
    """The fused loss leaves out the gradient of the head's weight alone."""
    frozen, trained = make(), make()
    trained.embedding.weight.requires_grad_(True)
    for gpt in (frozen, trained):
        training_loss_sum(gpt, gpt(TOKENS), TOKENS, precision).backward()
    gradients = [
        {name: each.grad for name, each in gpt.named_parameters() if is_factor(name)} for gpt in (frozen, trained)
    ]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert frozen.embedding.weight.grad is None and bool(trained.embedding.weight.grad.any())


def test_the_size_of_a_step_is_measured_on_factors_that_do_not_begin_with_zeros() -> None:
    gpt = make()
    assert len(sampled_weights(Parallel(gpt))) == len(list(adapted_layers(gpt)))


def test_a_memory_plan_counts_gradients_and_state_of_the_factors_alone() -> None:
    n_trained = count_trained(*configs(model={"lora_rank": RANK}), V)
    for rank, n in ((RANK, n_trained), (0, count_parameters(*configs(), V).total)):
        plan = plan_memory(*configs(model={"lora_rank": rank}), V, micro_batch=2, precision="fp32", optimizer="adamw")
        assert (plan.gradients, plan.optimizer) == (4 * n, 8 * n)
        assert plan.weights == 4 * count_parameters(*configs(model={"lora_rank": rank}), V).total
    assert plan.gathered_model == 0


def test_text_is_written_from_the_merged_weights() -> None:
    """Also where the matrices are packed for decoding, which would not see the factors."""
    tokenizer = ByteTokenizer()
    gpt = GPT(*configs(model={"lora_rank": RANK}), tokenizer.n_vocab, tokenizer.end_of_text)
    initialise(gpt, torch.Generator().manual_seed(3))  # B too
    request = Request(8, seed=1, sampling=Sampling(1.0))
    texts = [Engine(each, tokenizer, dtype=torch.float32).write("ab", request) for each in (gpt.eval(), merge(gpt))]
    assert texts[0] == texts[1]
    plain = GPT(*configs(), tokenizer.n_vocab, tokenizer.end_of_text)
    plain.load_state_dict({name: weight for name, weight in gpt.state_dict().items() if not is_factor(name)})
    assert Engine(plain.eval(), tokenizer, dtype=torch.float32).write("ab", request) != texts[0]
