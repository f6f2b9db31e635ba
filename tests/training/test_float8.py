"""Matrix products in 8 bits, by torchao, which emulates them on a CPU: right, and slowly."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from andrea.checkpoint import checkpoints_of
from andrea.cli.command_line import configure
from andrea.config import ModelConfig, RunConfig, UserError
from andrea.training.float8 import check_float8, fits, to_float8

pytest.importorskip("torchao")


# An emulated product takes a third of a microsecond per multiplication: a run of 8-bit layers must be very small.
SMALL = [
    "precision=bf16", "model.d_model=16", "model.d_mlp=16", "model.n_head=1", "model.n_layer=1", "train.eval_every=12",
    "train.save_every=12", "train.attention_every=12", "train.sample_tokens=0", "health.samples=0",
]  # fmt: skip


@pytest.fixture
def small_run(tiny_run, short_text: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Trains a very small model on a CPU, where a run in 8 bits is refused as slow."""
    monkeypatch.setattr("andrea.training.planning.auto.check_float8", lambda *asked: None)
    return lambda *words: tiny_run(f"data.path={short_text}", *SMALL, *words)


def test_a_layer_multiplies_operands_rounded_to_8_bits() -> None:
    """By hand: x and W scaled to e4m3's largest number and rounded, dy to e5m2's; sums in fp32."""
    x, dy = torch.randn(48, 64, requires_grad=True), torch.randn(48, 32)
    layers = nn.ModuleList([nn.Linear(64, 32, bias=False)])
    weight = layers[0].weight
    to_float8(layers)
    assert layers[0].weight is weight and list(layers.state_dict()) == ["0.weight"]
    y = layers[0](x)
    y.backward(dy)
    x8, w8, dy8 = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn), rounded(dy, torch.float8_e5m2)
    for name, got, expected in (("y", y, x8 @ w8.T), ("dx", x.grad, dy8 @ w8), ("dW", weight.grad, dy8.T @ x8)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert (y - x @ weight.T).abs().max() > 1e-3  # and that is another product than the plain one


def rounded(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    scale = torch.finfo(kind).max / x.detach().abs().max()
    return (x.detach() * scale).to(kind).float() / scale


def test_only_layers_whose_sizes_fit_are_changed() -> None:
    assert fits(nn.Linear(64, 32)) and not fits(nn.Linear(60, 32)) and not fits(nn.Linear(64, 33))
    assert not fits(nn.Embedding(64, 32))


def test_a_cpu_is_refused(tiny_run) -> None:
    with pytest.raises(UserError, match="float8=true needs a CUDA GPU, got device=cpu; use float8=false"):
        tiny_run("name=refused", "precision=bf16", "float8=true")


def test_a_run_learns_and_its_checkpoint_is_any_models(small_run, tmp_path: Path, capsys) -> None:
    # At the default rates a model this small is chaotic: the losses of four seeds differ by -4 to 15 %. At a third of the
    # rates they differ by at most 0.6 %.
    rates = {"": 0.003, "embedding_": 0.015, "matrix_": 0.006, "convolution_": 0.009}
    slow = [f"optimizer.{group}learning_rate={rate}" for group, rate in rates.items()]
    slow += ["train.steps=30", "train.eval_every=30", "train.save_every=30"]
    assert small_run("name=plain", *slow) == 0
    assert small_run("name=eight", "float8=true", *slow) == 0
    assert "the matrix products of the blocks are computed in 8 bits" in capsys.readouterr().out
    plain, eight = (losses(tmp_path / "runs" / name) for name in ("plain", "eight"))
    assert plain != eight and eight[-1] < math.log(257) - 1
    assert eight[-1] == pytest.approx(plain[-1], rel=0.02)
    assert small_run("resume=eight", "float8=true", "train.steps=34") == 0
    weights = checkpoints_of(tmp_path / "runs" / "eight")[-1]
    assert small_run("name=other", f"init_from={weights}", "train.steps=2") == 0


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("words", [["compile=on"], ["compile=blocks", "train.activation_checkpointing=true"]])
def test_a_compiled_run_equals_the_eager_one(small_run, tmp_path: Path, words: list[str]) -> None:
    for name, more in (("eager", []), ("compiled", words)):
        # Untied: a tied head's large first steps would amplify differences in rounding.
        same = ["float8=true", "train.steps=4", "model.tied_head=false"]
        assert small_run(f"name={name}", *same, *more) == 0
    eager, compiled = (losses(tmp_path / "runs" / name) for name in ("eager", "compiled"))
    assert compiled[-1] == pytest.approx(eager[-1], rel=0.01)


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["val/loss"] for record in records if "val/loss" in record]


def test_what_it_cannot_have_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, card = model_of(), torch.device("cuda")
    for kind in ("cpu", "mps"):
        with pytest.raises(UserError, match=f"needs a CUDA GPU, got device={kind}; use float8=false"):
            check_float8(model, torch.device(kind), "bf16")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match="compute capability 8.9 or later, but this GPU has 8.0"):
        check_float8(model, card, "bf16")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    check_float8(model, card, "bf16")
    with pytest.raises(UserError, match="needs precision=bf16, got precision=fp32; use precision=bf16 or float8=false"):
        check_float8(model, card, "fp32")
    with pytest.raises(UserError, match="needs model.sequence_length in multiples of 16, got 8;"):
        check_float8(model_of("model.sequence_length=8"), card, "bf16")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match="float8=true needs torchao; pip install torchao, or use float8=false"):
        check_float8(model, card, "bf16")


def model_of(*words: str) -> ModelConfig:
    return configure(RunConfig, "train", list(words)).model
