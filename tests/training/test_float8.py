"""Products of the blocks in 8 bits: torchao's own, on the CPU too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from andrea.checkpoint import checkpoints_of
from andrea.cli.command_line import configure
from andrea.config import ModelConfig, RunConfig, UserError
from andrea.training.float8 import check_float8, fits, to_float8

pytest.importorskip("torchao")


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


@pytest.fixture
def a_cpu_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does the same, no faster, which is why it is refused there."""
    monkeypatch.setattr("andrea.training.planning.settle.check_float8", lambda *asked: None)


def test_a_cpu_is_refused(tiny_run) -> None:
    with pytest.raises(UserError, match="float8=true needs a CUDA card, got device=cpu; use float8=false"):
        tiny_run("name=refused", "precision=bf16", "float8=true")


def test_a_run_learns_and_its_checkpoint_is_any_models(tiny_run, a_cpu_may, tmp_path: Path, capsys) -> None:
    assert tiny_run("name=plain", "precision=bf16") == 0
    assert tiny_run("name=eight", "precision=bf16", "float8=true") == 0
    assert "the blocks' matrices are multiplied in 8 bits" in capsys.readouterr().out
    plain, eight = (losses(tmp_path / "runs" / name) for name in ("plain", "eight"))
    assert plain != eight and eight[-1] == pytest.approx(plain[-1], rel=0.03)
    assert tiny_run("resume=eight", "float8=true", "train.steps=16") == 0
    weights = checkpoints_of(tmp_path / "runs" / "eight")[-1]
    assert tiny_run("name=other", f"init_from={weights}", "train.steps=2") == 0


@pytest.mark.untraced
@pytest.mark.parametrize(
    "words", [["compile=on"], ["compile=blocks"], ["compile=blocks", "train.activation_checkpointing=true"]]
)
def test_compiled_it_is_the_same_run(tiny_run, a_cpu_may, tmp_path: Path, words: list[str]) -> None:
    for name, more in (("eager", []), ("compiled", words)):
        # A tied head's large first steps would multiply what rounding did.
        same = ["precision=bf16", "float8=true", "train.steps=4", "model.tied_head=false"]
        assert tiny_run(f"name={name}", *same, *more) == 0
    eager, compiled = (losses(tmp_path / "runs" / name) for name in ("eager", "compiled"))
    assert compiled[-1] == pytest.approx(eager[-1], rel=0.01)


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["val/loss"] for record in records if "val/loss" in record]


def test_what_it_cannot_have_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, card = model_of(), torch.device("cuda")
    for kind in ("cpu", "mps"):
        with pytest.raises(UserError, match=f"needs a CUDA card, got device={kind}; use float8=false"):
            check_float8(model, torch.device(kind), "bf16")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match="compute capability 8.9 or later, this card has 8.0"):
        check_float8(model, card, "bf16")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    check_float8(model, card, "bf16")
    with pytest.raises(UserError, match="goes with bf16, got precision=fp32; use precision=bf16 or float8=false"):
        check_float8(model, card, "fp32")
    with pytest.raises(UserError, match="needs model.sequence_length in multiples of 16, got 8;"):
        check_float8(model_of("model.sequence_length=8"), card, "bf16")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match="float8=true needs torchao; pip install torchao, or use float8=false"):
        check_float8(model, card, "bf16")


def model_of(*words: str) -> ModelConfig:
    return configure(RunConfig, "train", list(words)).model
