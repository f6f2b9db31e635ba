"""How one process wraps its loss: what is compiled, and that compiling can be undone."""

from __future__ import annotations

import pytest
import torch

from andrea.config import group_config
from andrea.model import GPT
from andrea.training.loss.loss import MicroBatchLoss
from andrea.training.parallel.ranks import Parallel


@pytest.fixture
def loss() -> MicroBatchLoss:
    config = group_config("model", "andrea-nano", d_model=16, n_layer=2, n_head=2, d_mlp=16, sequence_length=8)
    model = GPT(config, group_config("attention", "scaled_dot"), 31)
    return MicroBatchLoss(model, torch.device("cpu"), "fp32", False, False)


def compiled_names(loss: MicroBatchLoss) -> set[str]:
    """The methods that are functions of the object itself, in the place of those of its class."""
    return {name for name in vars(loss) if callable(getattr(type(loss), name, None))}


@pytest.mark.parametrize(
    ("compile_mode", "names"),
    [("off", set()), ("on", {"forward_in_precision"}), ("blocks", {"call_block", "head_loss"})],
)
def test_a_mode_compiles_its_functions_at_the_first_call_and_they_can_be_restored(
    compile_mode: str, names: set[str], loss: MicroBatchLoss
) -> None:
    parallel = Parallel(loss.model)
    assert parallel.wrap(loss, compile_mode) is loss
    assert compiled_names(loss) == names
    parallel.uncompile(loss)
    assert compiled_names(loss) == set()
