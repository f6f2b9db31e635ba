"""The running average of the weights: its formula, its place in checkpoints, and which weights are evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from andrea.checkpoint import checkpoints_of, newest_whole
from andrea.checkpoint.model import load_model
from andrea.training.optimizer import WeightAverage
from andrea.training.parallel.ranks import Parallel


def test_a_step_counts_half_as_much_as_one_a_half_life_later() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    average = WeightAverage(Parallel(nn.ParameterDict({"w": parameter})), half_life=2.0)
    history = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    for n_step, weights in enumerate(history, start=1):
        parameter.data.copy_(weights)
        average.update(torch.tensor(float(n_step)), torch.tensor(True))
        factors = 0.5 ** (torch.arange(n_step).flip(0) / 2.0)
        expected = (factors[:, None] * history[:n_step]).sum(0) / factors.sum()
        torch.testing.assert_close(average.averages["w"], expected)
    before = average.averages["w"].clone()
    average.update(torch.tensor(8.0), torch.tensor(False))
    assert torch.equal(average.averages["w"], before)


def test_the_model_has_its_own_weights_again_also_after_an_error() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    average = WeightAverage(Parallel(nn.ParameterDict({"w": parameter})), half_life=1.0)
    average.update(torch.tensor(1.0), torch.tensor(True))
    parameter.data.fill_(5.0)
    with pytest.raises(OSError), average.in_model():
        assert parameter.tolist() == [1.0, 2.0]
        raise OSError
    assert parameter.tolist() == [5.0, 5.0] and average.averages["w"].tolist() == [1.0, 2.0]


def test_evaluations_and_loaded_models_use_the_average_and_training_does_not(tiny_run, tmp_path: Path) -> None:
    words = ["precision=fp32", "train.sample_tokens=0", "train.steps=8"]
    assert tiny_run("name=plain", *words) == tiny_run("name=averaged", "optimizer.average_half_life=4", *words) == 0
    plain, averaged = (newest_whole(tmp_path / "runs" / name) for name in ("plain", "averaged"))
    weights, tokenizer = averaged.model_tensors(), averaged.tokenizer()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.model_tensors().items())
    assert averaged.state["val_bpb"] != plain.state["val_bpb"]
    name = "blocks.1.mlp.down.weight"
    loaded = load_model(averaged, tokenizer).get_parameter(name)
    assert torch.equal(loaded, averaged.optimizer_tensors()[f"{name}/average"]) and not torch.equal(
        loaded, weights[name]
    )
    # A new run from it begins with the average.
    start = [
        f"init_from={averaged.path}",
        "train.steps=1",
        "optimizer.learning_rate=1e-12",
        "optimizer.matrix_learning_rate=1e-12",
        "optimizer.convolution_learning_rate=1e-12",
    ]
    assert tiny_run("name=next", *words, *start, "optimizer.embedding_learning_rate=1e-12") == 0
    begun = newest_whole(tmp_path / "runs" / "next")
    torch.testing.assert_close(begun.model_tensors()[name], loaded)
    assert begun.state["val_bpb"] == pytest.approx(averaged.state["val_bpb"], abs=1e-5)
    assert len(checkpoints_of(tmp_path / "runs" / "averaged")) == 2
