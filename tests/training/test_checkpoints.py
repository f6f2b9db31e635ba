"""A checkpoint is written only of finite weights and optimizer state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from andrea.training.optimizer import LossScale
from andrea.training.parallel.ranks import Ranks
from andrea.training.trainer import RunCheckpoints


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wrong", [(), ("a",), ("b", "a/momentum"), ("a/momentum", "b/momentum"), ("b/momentum",)])
def test_the_first_tensor_that_is_not_finite_is_named(wrong: tuple[str, ...], value: float) -> None:
    weights, state = ({f"{name}{kind}": torch.ones(3, 2) for name in "ab"} for kind in ("", "/momentum"))
    for name in wrong:
        (weights | state)[name][2, 1] = value
    saver = SimpleNamespace(
        parallel=SimpleNamespace(local_parameters=weights, ranks=Ranks()),
        optimizer=SimpleNamespace(state_tensors=lambda: state),
    )
    checkpoints = SimpleNamespace(saver=saver, scale=LossScale(torch.device("cpu"), active=False), damaged="")
    assert RunCheckpoints.is_finite(checkpoints) == (not wrong)
    assert checkpoints.damaged == (f", but {wrong[0]} is not finite: nothing was saved" if wrong else "")
