"""The factor on an fp16 loss: halved on overflow, doubled after long success, one in other precisions."""

from __future__ import annotations

import torch

from andrea.training.optimizer import GROWTH_INTERVAL, LossScale

CPU = torch.device("cpu")


def test_the_loss_scale_halves_on_overflow_and_doubles_after_long_success() -> None:
    scale = LossScale(CPU, active=True)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 2.0**16)
    scale.unscale([parameter])
    assert torch.equal(parameter.grad, torch.ones(3))
    scale.update(torch.tensor(False))
    assert scale.state() == [2.0**15, 0.0] and scale.may_back_off()
    for _ in range(GROWTH_INTERVAL):
        scale.update(torch.tensor(True))
    assert scale.state() == [2.0**16, 0.0]
    for _ in range(20):
        scale.update(torch.tensor(False))
    assert not scale.may_back_off()
    scale.load_state([4.0, 3.0])
    assert scale.state() == [4.0, 3.0]


def test_without_fp16_the_scale_is_one_and_excuses_nothing() -> None:
    scale = LossScale(CPU, active=False)
    scale.update(torch.tensor(False))
    assert scale.state() == [1.0, 0.0] and not scale.may_back_off()
