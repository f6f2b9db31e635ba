"""What becomes of `auto`. No GPU is needed: tensors on it are fake, and its measurement is given."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from andrea.api.command_line import configure
from andrea.attention.mask import SlidingWindow
from andrea.config import RunConfig, UserError
from andrea.training.planning import plan
from andrea.training.planning.plan import choose_attention


@pytest.mark.parametrize(
    ("milliseconds", "chosen", "why"),
    [
        ({"triton": 1.25, "cudnn": 2.5}, "triton", "fastest here, forward and backward: triton 1.25 ms, cudnn 2.50 ms"),
        ({}, "auto", "sdpa"),  # nothing could be measured: each call chooses
    ],
)
def test_on_a_gpu_auto_is_the_fastest_implementation(
    milliseconds: dict[str, float], chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measure", lambda case, n_batch, compiled: milliseconds)
    run = configure(RunConfig, "train", ["compile=off", "precision=bf16", "train.micro_batch=2"])
    with FakeTensorMode():
        choice = choose_attention(run, torch.device("cuda"))
    assert choice.value == chosen and why in choice.why


def test_a_kernel_that_the_card_is_too_old_for_is_refused_before_anything_is_built(monkeypatch) -> None:
    """One line that names the key; planning comes before the model, so nothing was traced."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    words = ["precision=fp16", "train.micro_batch=2", "attention.implementation=triton"]
    with FakeTensorMode(), pytest.raises(UserError) as refused:
        choose_attention(configure(RunConfig, "train", words), torch.device("cuda"))
    line = str(refused.value)
    assert "needs a GPU of compute capability 8.0, got 7.5; choose another, or attention.implementation=auto" in line
    assert "\n" not in line


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_implementations_are_measured_in_the_mode_in_which_they_train(deterministic, monkeypatch) -> None:
    """Else cuDNN could win, which deterministic mode refuses in the first step."""
    modes = []
    found = lambda *inputs: modes.append(torch.are_deterministic_algorithms_enabled()) or {"triton": 1.0}  # noqa: E731
    monkeypatch.setattr(plan, "measure", found)
    words = ["compile=off", "precision=bf16", "train.micro_batch=2", f"deterministic={deterministic}"]
    before = torch.are_deterministic_algorithms_enabled()
    with FakeTensorMode():
        choose_attention(configure(RunConfig, "train", words), torch.device("cuda"))
    assert modes == [deterministic == "true"] and torch.are_deterministic_algorithms_enabled() == before


def test_the_windows_of_all_layers_are_measured_and_weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers: three short ones and a long one, which sdpa cannot serve."""
    times = {True: {"triton": 1.0, "flex": 2.0, "sdpa": 0.1}, False: {"flex": 3.0, "triton": 6.8}}
    monkeypatch.setattr(plan, "measure", lambda case, n_batch, compiled: times[isinstance(case.mask, SlidingWindow)])
    words = ["compile=off", "precision=bf16", "train.micro_batch=2", "attention.window=[64, 64, 64, null]"]
    with FakeTensorMode():
        choice = choose_attention(configure(RunConfig, "train", words), torch.device("cuda"))
    assert choice.value == "flex" and "flex 2.25 ms, triton 2.45 ms" in choice.why


def test_an_implementation_that_is_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure", lambda case, n_batch, compiled: pytest.fail("it was measured"))
    asked = ["compile=off", "precision=bf16", "train.micro_batch=2", "attention.implementation=reference"]
    with FakeTensorMode():
        assert choose_attention(configure(RunConfig, "train", asked), torch.device("cuda")).value == "reference"
    on_cpu = configure(RunConfig, "train", ["precision=fp32", "train.micro_batch=2"])
    assert choose_attention(on_cpu, torch.device("cpu")).value == "auto"
