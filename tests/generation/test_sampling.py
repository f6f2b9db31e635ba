"""Sampling rules on hand-solved cases and as properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from andrea.generation.sampling import (
    Sampling,
    choose_tokens,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
)

# Five tokens of probability 0.4, 0.3, 0.15, 0.1, 0.05, in mixed order.
PROBABILITIES = [0.1, 0.4, 0.05, 0.3, 0.15]
LOGITS = torch.tensor([PROBABILITIES]).log()
NO_HISTORY = torch.empty(1, 0, dtype=torch.int64)


def kept(logits: torch.Tensor) -> list[int]:
    return logits[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [1]), (2, [1, 3]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])],
)
def test_top_k(top_k, expected):
    assert kept(keep_top_k(LOGITS, top_k)) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.71, [1, 3, 4]),
        (0.86, [0, 1, 3, 4]),
        (0.99, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
        (None, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p(top_p, expected):
    assert kept(keep_top_p(LOGITS, top_p)) == expected


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(None, [0, 1, 2, 3, 4]), (0.0, [0, 1, 2, 3, 4]), (0.2, [0, 1, 3, 4]), (0.3, [1, 3, 4]), (0.7, [1, 3]), (1.0, [1])],
)
def test_min_p(min_p, expected):
    assert kept(keep_min_p(LOGITS, min_p)) == expected


def test_repetition_penalty_lowers_only_the_tokens_of_the_history():
    logits = torch.tensor([[2.0, -3.0, 1.0, -1.0], [4.0, 0.0, -2.0, 6.0]])
    history = torch.tensor([[0, 1, 0], [3, 2, 3]])
    expected = torch.tensor([[1.0, -6.0, 1.0, -1.0], [4.0, 0.0, -4.0, 3.0]])
    assert torch.equal(penalise_repetition(logits, history, 2.0), expected)
    assert penalise_repetition(logits, history, 1.0) is logits


def test_rules_treat_each_row_by_itself():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    assert keep_top_k(logits, 1).isfinite().tolist() == [[False, False, True], [True, False, False]]
    assert keep_top_p(logits, 0.1).isfinite().tolist() == [[False, False, True], [True, False, False]]


@pytest.mark.parametrize(
    "uniform, token", [(0.0, 0), (0.09, 0), (0.11, 1), (0.49, 1), (0.51, 2), (0.56, 3), (0.86, 4), (1 - 2**-24, 4)]
)
def test_draw_walks_the_cumulated_probability(uniform, token):
    assert draw(LOGITS, torch.tensor([uniform])).tolist() == [token]


def test_draw_never_takes_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, 5)
    assert draw(logits, torch.tensor([0.0, 1 - 2**-24])).tolist() == [1, 3]


def test_temperature_zero_is_argmax_and_a_tiny_one_nearly():
    uniform = torch.tensor([1 - 2**-24])
    assert choose_tokens(LOGITS, NO_HISTORY, Sampling(temperature=0), uniform).tolist() == [1]
    assert choose_tokens(LOGITS * 1e4, NO_HISTORY, Sampling(temperature=1e-36), uniform).tolist() == [1]


def test_temperature_zero_reads_the_penalty():
    history = torch.tensor([[1]])
    assert choose_tokens(LOGITS, history, Sampling(temperature=0, repetition_penalty=5.0), torch.zeros(1)).tolist() == [
        3
    ]


def test_frequencies_follow_probability_and_temperature():
    uniform = (torch.arange(10_007) + 0.5) / 10_007  # every part of [0, 1) once
    logits = LOGITS.expand(10_007, -1)
    history = torch.empty(10_007, 0, dtype=torch.int64)
    for temperature in (0.5, 1.0, 2.0):
        tokens = choose_tokens(logits, history, Sampling(temperature=temperature), uniform)
        weights = torch.tensor(PROBABILITIES) ** (1 / temperature)
        frequencies = torch.bincount(tokens, minlength=5) / 10_007
        assert torch.allclose(frequencies, weights / weights.sum(), atol=2e-4)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0, 5),
    top_k=st.none() | st.integers(1, 20),
    top_p=st.none() | st.floats(1e-6, 1),
    min_p=st.none() | st.floats(0, 1),
    penalty=st.floats(0.1, 10),
    uniform=st.floats(0, 1 - 2**-24),
)
def test_any_setting_chooses_a_possible_token(seed, temperature, top_k, top_p, min_p, penalty, uniform):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 13, generator=generator).bfloat16() * 30
    logits[:, 7] = -torch.inf
    history = torch.randint(0, 13, (3, 5), generator=generator)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    tokens = choose_tokens(logits, history, sampling, torch.full((3,), uniform))
    assert tokens.shape == (3,) and tokens.dtype == torch.int64
    assert ((tokens >= 0) & (tokens < 13) & (tokens != 7)).all()


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30])
def test_an_extreme_penalty_leaves_something_to_draw(penalty: float) -> None:
    logits, history = torch.randn(2, 7), torch.arange(7).expand(2, 7)
    chosen = choose_tokens(logits, history, Sampling(repetition_penalty=penalty), torch.tensor([0.0, 0.999]))
    assert chosen.min() >= 0 and chosen.max() < 7


def test_deterministic_mode_sums_on_the_cpu():
    """No GPU is needed: tensors on it are fake, and the devices of the sums are recorded."""
    devices = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.cumsum.default:
                devices.append(args[0].device.type)
            return function(*args, **(kwargs or {}))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with FakeTensorMode(), Recorder():
            logits, history = torch.zeros(2, 9, device="cuda"), torch.zeros(2, 3, dtype=torch.int64, device="cuda")
            chosen = choose_tokens(logits, history, Sampling(top_p=0.5), torch.zeros(2, device="cuda"))
    finally:
        torch.use_deterministic_algorithms(before)
    assert devices == ["cpu"] * 2 and chosen.device.type == "cuda"


def plain(x):
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


class LikeMPS(torch.Tensor):
    """A tensor on a device without fp64, as MPS is: what would make one of it raises, and `cpu` takes it off the device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function == torch.Tensor.device.__get__:
            return torch.device("mps")
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function == torch.Tensor.cpu:
            return plain(result)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 5, 0.9, 0.01, 1.2), Sampling(temperature=0)])
def test_a_device_without_fp64_draws_the_same_tokens(sampling, monkeypatch):
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda x, *where, **how: x.as_subclass(LikeMPS) if torch.device("mps") in where else to(x, *where, **how),
    )
    logits, history, uniform = torch.randn(3, 11), torch.randint(11, (3, 4)), torch.rand(3)
    there = [each.as_subclass(LikeMPS) for each in (logits, history, uniform)]
    with pytest.raises(TypeError):
        there[0].double()
    tokens = choose_tokens(*there[:2], sampling, there[2])
    assert type(tokens) is LikeMPS
    assert torch.equal(plain(tokens), choose_tokens(logits, history, sampling, uniform))
