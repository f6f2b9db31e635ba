"""Our attention kernels for CPUs, by the rule for every fast path, and as an operator of torch."""

from __future__ import annotations

import dataclasses
import platform
import subprocess

import pytest
import torch
from oracle import Case, judge

from andrea.attention import Case as AttentionCase
from andrea.attention import (
    DotProduct,
    ScaledDotProduct,
    ScoreModifiers,
    alibi_slopes,
    attend,
    causal,
    choose,
    refusal,
    sliding_window,
)
from andrea.attention.implementations.native import SOURCES, library, native_attention

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=[BF16, FP32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param == BF16:
        needs_bf16()
    assert library(request.param) is not None, "g++ makes the kernels that are tested here; install it"
    return request.param


@pytest.fixture(name="needs_bf16")
def needs_bf16_fixture() -> None:
    needs_bf16()


def needs_bf16() -> None:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply in bf16")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="for processors of x86")
@pytest.mark.parametrize("flags", ["-mavx512bf16 -mamx-tile -mamx-bf16", "-mavx512bf16", "-mno-avx512f"])
def test_compiles_for_processors_with_tiles_and_without(flags: str) -> None:
    source = SOURCES[BF16]
    options = ["-march=skylake-avx512", *flags.split(), "-std=c++17", "-fopenmp", "-fsyntax-only"]
    subprocess.run(["g++", *options, str(source)], check=True)


#         B  H  G    T    D
SHAPES = [
    (2, 3, 3, 13, 16), (1, 4, 2, 131, 64), (2, 2, 1, 64, 32), (1, 2, 2, 257, 128), (1, 1, 1, 1, 64), (3, 2, 2, 65, 48),
    (1, 6, 2, 127, 80), (1, 1, 1, 2, 256), (2, 1, 1, 63, 112),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_it_errs_no_more_than_the_readable_path(shape, dtype):
    B, H, G, T, D = shape
    judge(Case(B, H, G, T, T, D, D, "causal", dtype), "native")


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[-1]])
@pytest.mark.parametrize(
    "how", [{"softcap": 1.5}, {"alibi": True}, {"sink": True}, {"softcap": 4.0, "alibi": True, "sink": True}]
)
def test_modifiers_and_sinks(shape, how, needs_bf16):
    B, H, G, T, D = shape
    judge(Case(B, H, G, T, T, D, D, "causal", BF16, **how), "native")


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_native(query, key, value):
    return attend(query, key, value, compatibility=DotProduct(), mask=causal(), implementation="native")


def test_rows_may_lie_anywhere(dtype):
    """As a model's projections leave them, cut out of one tensor, turned, or one head for all."""
    packed = draw(2, 37, 3, 4, 16, dtype=dtype)
    apart = [packed[:, :, index].transpose(1, 2) for index in range(3)]
    turned = [each.mT.contiguous().mT for each in apart]
    lengths = [each.contiguous() for each in apart]
    expected = by_native(*lengths)
    assert torch.equal(by_native(*apart), expected) and torch.equal(by_native(*turned), expected)
    shared = [apart[0], *(each[:, :1].expand(-1, 4, -1, -1) for each in apart[1:])]
    assert torch.equal(by_native(*shared), by_native(*(each.contiguous() for each in shared)))
    assert torch.equal(by_native(*(each[0] for each in apart)), expected[0])  # no batch dimension
    assert torch.equal(by_native(*(each[None] for each in apart)), expected[None])  # two of them


def test_it_repeats_to_the_bit_whatever_the_threads(dtype):
    query, key, value, upstream = (draw(2, 5, 150, 32, seed=seed, dtype=dtype).requires_grad_() for seed in range(4))
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        output = by_native(query, key, value)
        results.append([output, *torch.autograd.grad(output, (query, key, value), upstream)])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_every_row_that_sees_it_and_in_no_other(bad, dtype):
    query, key, value = (draw(1, 1, 40, 16, seed=seed, dtype=dtype) for seed in range(3))
    spoilt = key.clone()
    spoilt[0, 0, 21, 3] = bad
    output, clean = by_native(query, spoilt, value), by_native(query, key, value)
    seen = output[0, 0].isfinite().all(1)
    assert torch.equal(output[0, 0, :21], clean[0, 0, :21])
    expected = attend(query, spoilt, value, compatibility=DotProduct(), mask=causal(), implementation="reference")
    assert torch.equal(seen, expected[0, 0].isfinite().all(1)) and not seen[21:].all()


def test_a_large_score_takes_all(dtype):
    query, key = torch.full((1, 1, 20, 16), 30.0, dtype=dtype), torch.zeros(1, 1, 20, 16, dtype=dtype)
    key[:, :, 4] = 30.0
    value = draw(1, 1, 20, 16, dtype=dtype)
    assert torch.equal(by_native(query, key, value)[0, 0, 4:], value[0, 0, 4].expand(16, 16))


def test_it_is_an_operator_of_torch(dtype):
    inputs = [draw(2, n_head, 19, 16, seed=seed, dtype=dtype) for seed, n_head in ((1, 4), (2, 2), (3, 2))]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = [each.requires_grad_() for each in inputs]
    torch.library.opcheck(native_attention, (*inputs, 0.0, None, None), test_utils=checks)
    if dtype == BF16:
        scoring = (2.5, alibi_slopes(4), torch.randn(4, requires_grad=True))
        torch.library.opcheck(native_attention, (*inputs, *scoring), test_utils=checks)


@pytest.mark.untraced
def test_compiled_and_under_autocast_it_is_the_same(dtype):
    query, key, value = (draw(2, 3, 29, 16, seed=seed).float().requires_grad_() for seed in range(3))

    def step(query, key, value):
        with torch.autocast("cpu", BF16, enabled=dtype == BF16):
            return by_native(query, key, value).float().square().sum()

    results = []
    for run in (step, torch.compile(step, fullgraph=True, dynamic=False)):
        loss = run(query, key, value)
        results.append([loss, *torch.autograd.grad(loss, (query, key, value))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float64}, "computes in bf16 and fp32, got torch.float64"),
        ({"mask": sliding_window(3)}, "the causal mask only"),
        ({"mask": None}, "the causal mask only"),
        ({"n_key": 12}, "equal numbers of queries and keys"),
        ({"width": 24}, "a multiple of 16, got 24"),
        ({"width_of_value": 32}, "keys and values of equal width"),
        ({"start": 1}, "both starting at position 0"),
    ],
)
def test_what_it_cannot_serve_it_says_and_auto_takes_another(change, said):
    case = {"dtype": FP32, "mask": causal(), "n_key": 11, "width": 16, "start": None} | change
    query = draw(1, 2, 11, case["width"]).to(case["dtype"])
    key = draw(1, 2, case["n_key"], case["width"]).to(case["dtype"])
    value = draw(1, 2, case["n_key"], change.get("width_of_value", case["width"])).to(case["dtype"])
    asked = AttentionCase(query, key, value, ScaledDotProduct(), case["mask"], start=case["start"])
    assert said in refusal("native", asked)
    with pytest.raises(ValueError, match="implementation='native' cannot be used here"):
        attend(query, key, value, mask=case["mask"], start=case["start"], implementation="native")
    assert choose("auto", asked)[0] != "native"


@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])
def test_auto_takes_it_in_fp32_for_compiled_training_where_it_was_measured(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    query = draw(1, 2, 600, 16, dtype=FP32).requires_grad_()
    case = AttentionCase(query, query, query, ScaledDotProduct(), causal(), compiled=True)
    assert (choose("auto", case)[0] == "native") == (capability == "AVX2")
    for change in ({"compiled": False}, {"query": query.detach()}, {"modifiers": ScoreModifiers(softcap=5.0)}):
        assert choose("auto", dataclasses.replace(case, **change))[0] != "native"


@pytest.mark.parametrize("change", [{"modifiers": ScoreModifiers(alibi=True)}, {"sink": torch.zeros(2)}])
def test_in_fp32_scores_are_plain(change):
    query = draw(1, 2, 11, 16, dtype=FP32)
    case = AttentionCase(query, query, query, ScaledDotProduct(), causal(), **change)
    assert "plain scores only" in refusal("native", case)


def test_auto_takes_it_where_it_serves(needs_bf16):
    query = draw(1, 2, 600, 16)
    case = AttentionCase(query, query, query, ScaledDotProduct(), causal())
    assert choose("auto", case)[0] == "native"
    measured = dataclasses.replace(case, statistics=True)
    assert refusal("native", measured) == "it does not return statistics; use triton or reference"
