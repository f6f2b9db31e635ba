"""Groups of parameters, clipping, AdamW's step, saved state, and that a step that is not finite changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from head_options import ALL_OPTIONS, words_of

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.model import GPT, initialise
from andrea.training.optimizer import MOMENTUM, Optimizer, group_parameters, orthogonalise, rate_at, saved_shapes
from andrea.training.parallel.ranks import Parallel

SMALL = [
    "model.d_model=24",
    "model.n_layer=2",
    "model.n_head=3",
    "model.d_mlp=40",
    "model.sequence_length=11",
    "model.recipe_tokens_per_step=11",
]


def make(*words: str) -> tuple[GPT, Optimizer]:
    run = configure(RunConfig, "train", [*words, *SMALL])
    model = GPT(run.model, run.attention, 29)
    initialise(model, torch.Generator().manual_seed(1))
    return model, Optimizer(Parallel(model), run.optimizer, bf16=False)


def random_gradients(model: GPT, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", ["andrea-nano", "gpt2", "nano-llama", "nano-nope", "nano-relu2"])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group_and_moves(name: str, kind: str) -> None:
    model, optimizer = make(f"model={name}", f"optimizer={kind}")
    grouped = [
        parameter
        for members in group_parameters(dict(model.named_parameters())).values()
        for parameter in members.values()
    ]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    random_gradients(model)
    optimizer.step(1.0, torch.tensor(True))
    for name, parameter in model.named_parameters():
        moves = name != "blocks.0.attention.value_mix"  # in the first block both values it mixes are the same
        assert torch.equal(parameter, before[name]) != moves, name


@pytest.mark.parametrize("option", ALL_OPTIONS)
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_options_of_the_heads_move_and_keep_their_state(option: str, kind: str) -> None:
    model, optimizer = make(f"optimizer={kind}", *words_of(option))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    random_gradients(model)
    optimizer.step(1.0, torch.tensor(True))
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert still == {"blocks.0.attention.value_mix"}
    expected = saved_shapes(
        dict(model.named_parameters()), configure(RunConfig, "train", [f"optimizer={kind}"]).optimizer
    )
    assert {name: tuple(each.shape) for name, each in optimizer.state_tensors().items()} == expected


def test_a_parameter_of_an_unknown_name_is_an_error() -> None:
    model, _ = make()
    model.extra = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(AssertionError, match="extra"):
        group_parameters(dict(model.named_parameters()))


def test_each_rate_goes_to_its_parameters_and_decay_is_only_for_matrices() -> None:
    model, optimizer = make(
        "optimizer=muon", "optimizer.tuned_d_model=null", "optimizer.tuned_n_layer=null", "model.tied_head=false"
    )
    peaks = {
        optimizer.names[p]: (g["peak"], g["weight_decay"]) for g in optimizer.adamw.param_groups for p in g["params"]
    }
    config = configure(RunConfig, "train", []).optimizer
    assert peaks["head.weight"] == (config.learning_rate, 0.0)
    assert peaks["embedding.weight"] == (config.embedding_learning_rate, 0.0)
    assert not any(name.startswith("blocks") and name.endswith(".weight") and "norm" not in name for name in peaks)


@pytest.mark.parametrize("tuned_d_model", [6, 24])
def test_adamw_shrinks_a_matrix_by_the_same_share_at_any_width(tuned_d_model: int) -> None:
    """Its rate is divided by the width, relative to the tuned one, and its weight decay is multiplied. Gradients are 0."""
    words = ["optimizer=adamw", f"optimizer.tuned_d_model={tuned_d_model}", "optimizer.tuned_n_layer=2"]
    model, optimizer = make(*words, "optimizer.weight_decay=0.3", "optimizer.learning_rate=0.5")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1, torch.tensor(True))
    for name in ("blocks.1.mlp.up.weight", "blocks.0.attention.key.weight", "embedding.weight"):
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] * (1 - 0.1 * 0.5 * 0.3))
    assert torch.equal(model.get_parameter("final_norm.weight"), before["final_norm.weight"])


@pytest.mark.parametrize(("kind", "rates"), [("muon", (1.0, 0.75, 0.5, 0.25)), ("adamw", (1.0, 0.775, 0.55, 0.325))])
def test_weight_decay_falls_with_the_rate(kind: str, rates: tuple[float, ...]) -> None:
    """In a run of 4 steps whose rate falls from 1 towards 0, or towards a tenth; gradients are 0."""
    words = ["optimizer.schedule=constant_then_decay", "optimizer.decay_fraction=1", "optimizer.warmup_steps=0"]
    words += ["optimizer.weight_decay=0.3", "optimizer.matrix_learning_rate=0.5"]
    model, optimizer = make(f"optimizer={kind}", *words)
    expected = model.get_parameter("blocks.1.mlp.up.weight").detach().clone()
    for step, rate in enumerate(rates):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(rate_at(step, 4, optimizer.config), torch.tensor(True))
        expected *= 1 - 0.5 * 0.3 * rate
    torch.testing.assert_close(model.get_parameter("blocks.1.mlp.up.weight").detach(), expected)


def test_clipping_leaves_a_global_norm_of_at_most_the_limit() -> None:
    model, optimizer = make()
    random_gradients(model)
    norm = optimizer.clip()
    after = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert norm > optimizer.clip_norm and after == pytest.approx(optimizer.clip_norm, rel=1e-4)
    small = [p.grad.clone() for p in model.parameters()]
    optimizer.clip_norm = 100.0
    optimizer.clip()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), small, strict=True))


def test_adamw_moves_against_the_sign_of_a_first_gradient() -> None:
    model, optimizer = make("optimizer=adamw", "optimizer.weight_decay=0")
    before = model.embedding.weight.detach().clone()
    random_gradients(model)
    optimizer.step(0.5, torch.tensor(True))
    group = next(g for g in optimizer.adamw.param_groups if any(p is model.embedding.weight for p in g["params"]))
    expected = before - 0.5 * group["peak"] * model.embedding.weight.grad.sign()  # Kingma & Ba 2015, first step
    torch.testing.assert_close(model.embedding.weight.detach(), expected, atol=1e-5, rtol=0)


def test_muon_moves_the_matrices_at_the_configured_rates() -> None:
    """W (1 - rate decay) - rate sqrt(max(1, rows / columns)) O(momentum), of matrices of two shapes."""
    model, optimizer = make("optimizer.tuned_d_model=null", "optimizer.tuned_n_layer=null", "optimizer.muon_rows=none")
    config = configure(RunConfig, "train", []).optimizer
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    random_gradients(model)
    optimizer.step(0.7, torch.tensor(True))
    for name in ("blocks.1.mlp.up.weight", "blocks.0.mlp.down.weight", "blocks.0.attention.key.weight"):
        parameter, rate = model.get_parameter(name), 0.7 * config.matrix_learning_rate
        momentum = (1 - MOMENTUM) * parameter.grad
        nesterov = parameter.grad.lerp(momentum, MOMENTUM)
        longer = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        moved = before[name] * (1 - rate * config.decay) - rate * longer * orthogonalise(nesterov[None])[0]
        torch.testing.assert_close(parameter.detach(), moved, atol=1e-6, rtol=1e-5)


KINDS = ["muon", "muon optimizer.muon_rows=none", "adamw"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_changes_neither_weights_nor_state(kind: str) -> None:
    model, optimizer = make(*f"optimizer={kind}".split())
    random_gradients(model)
    optimizer.step(1.0, torch.tensor(True))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.clip()
    optimizer.step(1.0, torch.tensor(False))
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.state_tensors().items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_saved_and_loaded_goes_on_bit_for_bit(kind: str) -> None:
    model, optimizer = make(*f"optimizer={kind}".split())
    random_gradients(model)
    optimizer.step(1.0, torch.tensor(True))
    twin, twin_optimizer = make(*f"optimizer={kind}".split())
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_tensors({name: tensor.clone() for name, tensor in optimizer.state_tensors().items()})
    for each, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        random_gradients(each, seed=5)
        its_optimizer.step(0.7, torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_foreign_state_is_refused() -> None:
    model, optimizer = make()
    random_gradients(model)
    optimizer.step(1.0, torch.tensor(True))
    with pytest.raises(AssertionError, match="no parameter owns"):
        optimizer.load_state_tensors(optimizer.state_tensors() | {"ghost/step": torch.zeros(())})
