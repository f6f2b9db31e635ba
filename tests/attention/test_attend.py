"""The public function: every implementation against the oracle, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import MASKS as WRITTEN_MASKS
from oracle import Case, judge
from torch._subclasses.fake_tensor import FakeTensorMode

from andrea.attention import (
    Additive,
    Compatibility,
    DotProduct,
    Mask,
    ScaledDotProduct,
    attend,
    attend_reference,
    attention_weights,
    causal,
    choose,
    key_padding,
    packed_documents,
)
from andrea.attention import Case as AttentionCase
from andrea.attention.attend import refusal
from andrea.attention.implementations import flex

SCALED = ScaledDotProduct()


class Checkered(Mask):
    """A mask of the user's own: no interval."""

    def visible(self, query_position, key_position):
        return (query_position + key_position) % 2 == 0


MASKS = {"none": None, "causal": causal(), "padding": causal() & key_padding(torch.tensor([[5], [0]]))}


def tensors(n_query, n_key, dtype, lead=(2, 3), requires_grad=False):
    torch.manual_seed(n_query)
    shapes = ((n_query, 7), (n_key, 7), (n_key, 11))
    return [torch.randn(*lead, *shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("n_query", "n_key"), [(13, 13), (5, 13), (1, 13), (13, 5)])
@pytest.mark.parametrize("compatibility", [DotProduct(), ScaledDotProduct()])
def test_sdpa_agrees_with_the_reference_in_output_and_gradients(compatibility, n_query, n_key, mask):
    inputs = tensors(n_query, n_key, torch.float64, requires_grad=True)
    results = []
    for implementation in ("reference", "sdpa"):
        output = attend(*inputs, compatibility=compatibility, mask=MASKS[mask], implementation=implementation)
        results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(
    "implementation", ["sdpa", pytest.param("triton", marks=[pytest.mark.untraced, pytest.mark.slow])]
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_implementation_agrees_with_the_reference(implementation, data):
    """Values and gradients under the rule of oracle.py: odd lengths, T < block, one key, grouped heads, every mask."""
    groups = data.draw(st.sampled_from([1, 2, 3]), "G")
    n_query = data.draw(st.integers(1, 40), "T")
    n_key = data.draw(st.one_of(st.just(n_query), st.integers(1, 40)), "S")
    case = Case(
        data.draw(st.integers(1, 3), "B"), groups * data.draw(st.sampled_from([1, 2, 5]), "H / G"), groups,
        n_query, n_key,
        data.draw(st.sampled_from([16, 17, 32, 64, 100, 128, 256]), "d_k"),
        data.draw(st.sampled_from([16, 24, 64, 128]), "d_v"),
        data.draw(st.sampled_from(WRITTEN_MASKS), "mask"),
        data.draw(st.sampled_from([torch.float32, torch.float16 if implementation == "triton" else torch.bfloat16]), "type"),
    )  # fmt: skip
    judge(case, implementation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [*WRITTEN_MASKS, "checkered"])
@torch.no_grad()
def test_flex_agrees_with_the_reference_in_values(mask, dtype):
    """FlexAttention's gradients and compiled form need a card (bench/gpu_checks.py); the masks and shapes do not."""
    for shape in ((2, 6, 3, 13, 13, 16, 16), (1, 2, 2, 5, 37, 32, 32)):
        case = Case(*shape, "none" if mask == "checkered" else mask, dtype)
        made = Checkered() if mask == "checkered" else case.made_mask()
        exact, eager, fast = (
            attend_by(*(tensor for tensor in case.inputs(precision)[:3]), mask=made)
            for attend_by, precision in ((readable, torch.float64), (readable, dtype), (flexible, dtype))
        )
        last_place = torch.finfo(dtype).eps * exact.abs().max()
        assert (fast - exact).abs().max() <= 2 * (eager - exact).abs().max() + last_place


def readable(query, key, value, mask):
    return attend(query, key, value, mask=mask, implementation="reference")


def flexible(query, key, value, mask):
    """The way of implementation="flex", which on the CPU has no backward and is therefore refused there."""
    return flex.run(AttentionCase(query, key, value, ScaledDotProduct(), mask))[0]


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 3, 5)])
def test_flex_takes_any_leading_dimensions(lead):
    query, key, value = (torch.randn(*lead, n, 16) for n in (5, 13, 13))
    expected = readable(query, key, value, causal())
    torch.testing.assert_close(flexible(query, key, value, causal()), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 3, 5)])
def test_any_leading_dimensions(lead, implementation):
    query, key, value = tensors(5, 13, torch.float32, lead)
    output = attend(query, key, value, mask=causal(), implementation=implementation)
    assert output.shape == (*lead, 5, 11)
    last = tuple(n - 1 for n in lead)
    alone = attend(query[last], key[last], value[last], mask=causal(), implementation=implementation)
    torch.testing.assert_close(output[last], alone)


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
@pytest.mark.parametrize("n_query", [1, 3])
def test_start_says_where_the_queries_stand_in_a_longer_memory(n_query, implementation):
    """Keys after the queries are there and not seen; an int and a tensor mean the same."""
    query, key, value = tensors(n_query, 13, torch.float64)
    stop = 4 + n_query
    expected = attend(query, key[:, :, :stop], value[:, :, :stop], mask=causal(), implementation="reference")
    for start in (4, torch.tensor(4)):
        got = attend(query, key, value, mask=causal(), start=start, implementation=implementation)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_a_blind_query_gets_zeros_and_finite_gradients(implementation):
    inputs = tensors(5, 5, torch.float32, requires_grad=True)
    output = attend(*inputs, mask=key_padding(torch.tensor([[0], [3]])), implementation=implementation)
    assert (output[0] == 0).all() and (output[1] != 0).all()
    output.square().sum().backward()
    assert all(tensor.grad.isfinite().all() and (tensor.grad[0] == 0).all() for tensor in inputs)


def test_weights_times_values_is_the_output():
    query, key, value = tensors(5, 13, torch.float64)
    for start in (None, 3, torch.tensor(3)):
        weights = attention_weights(query, key, mask=causal(), start=start)
        torch.testing.assert_close(weights @ value, attend(query, key, value, mask=causal(), start=start))


def test_weights_are_the_references_own():
    query, key, value = tensors(5, 13, torch.float32)
    expected = attend_reference(query, key, value, ScaledDotProduct(), causal(), 13 - 5).weights
    assert torch.equal(attention_weights(query, key, mask=causal()), expected)


def test_choose_tells_what_runs_and_why():
    inputs = tensors(5, 13, torch.float32)

    def chosen(name, compatibility=SCALED, **options):
        return choose(name, AttentionCase(*inputs, compatibility, **options))

    assert chosen("auto") == (
        "sdpa",
        "torch's fused kernels support every compatibility function that can be written as a dot product",
    )
    for name in ("sdpa", "reference"):
        assert chosen(name) == (name, "chosen by name")
    assert chosen("auto", statistics=True) == (
        "reference",
        "only the reference implementation computes statistics for this case",
    )
    additive = Additive(7, 7, 5)
    for statistics in (False, True):
        assert chosen("auto", compatibility=additive, statistics=statistics)[0] == "chunked"

    class ScoresAlone(Compatibility):
        def scores(self, query, key):
            return (query @ key.mT).relu()

    assert chosen("auto", compatibility=ScoresAlone()) == (
        "reference",
        "ScoresAlone has no method `lower` that rewrites it as a plain dot product",
    )
    assert chosen("auto", compiled=True)[0] == "sdpa"  # nothing trains here: no gradient is wanted


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "sdpa",
            {"compatibility": Additive(7, 7, 5)},
            "every fused kernel needs a plain dot product, and Additive has no method `lower`",
        ),
        ("triton", {"compatibility": Additive(7, 7, 5)}, "every fused kernel needs a plain dot product"),
        ("chunked", {}, "it supports the additive function only"),
        ("sdpa", {"statistics": True}, "it does not return statistics; use triton or reference"),
        ("flex", {}, "it needs a CUDA GPU, got device=cpu"),
        ("sdpa_cudnn", {}, "it needs a CUDA GPU, got device=cpu"),
        ("triton", {"mask": Checkered()}, "the mask Checkered does not say which interval of keys a query sees"),
        ("triton", {"mask": causal() & Checkered()}, "the mask Both does not say which interval"),
    ],
)
def test_a_named_implementation_that_cannot_serve_raises_with_the_reason(name, options, reason):
    with pytest.raises(ValueError, match=f"implementation='{name}' cannot be used here: {reason}"):
        attend(*tensors(5, 5, torch.float32), implementation=name, **options)


CUDA_ONLY = ("flex", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn")


class OnCard:
    """Says that a tensor is on a CUDA GPU."""

    device = torch.device("cuda")

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def __getitem__(self, index):
        return OnCard(self.tensor[index])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_for_cuda_are_refused_on_every_other_device(device):
    query = torch.empty(2, 3, 5, 16, device=device, dtype=torch.bfloat16)
    for name in CUDA_ONLY:
        assert refusal(name, AttentionCase(query, query, query, SCALED)) == f"it needs a CUDA GPU, got device={device}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compiled": True}, "sdpa"),
        ({"mask": causal()}, "sdpa"),
        ({"mask": causal(), "statistics": True}, "triton"),
        ({"mask": Checkered(), "statistics": True}, "reference"),
    ],
)
def test_on_a_cuda_gpu_its_kernels_serve_and_auto_chooses_among_them(options, expected, monkeypatch):
    if expected == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    query, key = OnCard(torch.empty(2, 3, 5, 16)), OnCard(torch.empty(2, 3, 5, 16))
    case = AttentionCase(query, key, key, SCALED, **options)
    assert choose("auto", case)[0] == expected
    for name in CUDA_ONLY:
        reason = refusal(name, case)
        assert reason == ("it does not return statistics; use triton or reference" if case.statistics else None)
    short = AttentionCase(query[..., :2, :], key, key, SCALED, causal())  # fewer queries than keys
    assert "only the causal mask, with equal numbers" in refusal("sdpa_flash", short)
    assert refusal("sdpa_efficient", short) is None and refusal("native", short).startswith("it runs on CPUs only")


def test_a_mask_of_ones_own_needs_the_predicate_alone():
    query, key, value = tensors(5, 13, torch.float64)
    weights = attention_weights(query, key, mask=causal() & Checkered())
    position = torch.arange(8, 13)[:, None]
    allowed = (torch.arange(13) <= position) & ((torch.arange(13) + position) % 2 == 0)
    assert torch.equal(weights[0, 0] > 0, allowed)
    for implementation in ("auto", "sdpa"):
        got = attend(query, key, value, mask=causal() & Checkered(), implementation=implementation)
        torch.testing.assert_close(got, weights @ value)


@pytest.mark.parametrize(
    ("n_key", "training", "expected"),
    [(512, True, "reference"), (513, True, "sdpa"), (512, False, "sdpa")],
)
def test_short_training_compiled_for_a_cpu_is_written_out(n_key, training, expected):
    @torch.compile(backend="eager", fullgraph=True, dynamic=False)
    def is_reference(query, key):
        return query.new_zeros(()) + (choose("auto", AttentionCase(query, key, key, SCALED))[0] == "reference")

    query, key, _ = tensors(3, n_key, torch.float32, lead=(), requires_grad=training)
    assert is_reference(query, key).item() == (expected == "reference")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(
        ValueError, match="implementation='flash' is unknown; allowed: auto, reference, chunked, native"
    ):
        attend(*tensors(5, 5, torch.float32), implementation="flash")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 7), (5, 3), (5, 7)), r"same width for a dot product, got query \(5, 7\) and key \(5, 3\)"),
        (((5, 7), (5, 7), (3, 7)), r"each key needs one value, got key \(5, 7\) and value \(3, 7\)"),
        (((2, 1, 5, 7), (3, 1, 5, 7), (3, 1, 5, 7)), r"leading dimensions must be equal, got query \(2, 1, 5, 7\)"),
        (((5, 7), (3, 5, 7), (3, 5, 7)), r"leading dimensions must be equal, got query \(5, 7\)"),
        (((2, 6, 5, 7), (2, 3, 5, 7), (2, 2, 5, 7)), "leading dimensions must be equal"),
        (((2, 6, 5, 7), (2, 4, 5, 7), (2, 4, 5, 7)), "key/value heads must divide the query heads, got query"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("mask", [key_padding(torch.tensor([3, 1])), causal() & packed_documents(torch.zeros(2, 5))])
def test_a_mask_that_would_meet_the_heads_instead_of_the_batch_is_refused(mask):
    """Where B = H, lengths (B,) would broadcast over the heads and be silently wrong."""
    tensor = torch.randn(2, 2, 5, 7)
    with pytest.raises(
        ValueError, match=r"the mask has 1 leading dimensions and query \(2, 2, 5, 7\) has 2: .*lengths"
    ):
        attend(tensor, tensor, tensor, mask=mask)
    assert attend(tensor[0], tensor[0], tensor[0], mask=mask).shape == (2, 5, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_apple_s_gpu_what_cannot_run_is_refused_in_one_line_that_names_the_device(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values stand for a device that this machine does not have."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with FakeTensorMode():
        tensor = torch.empty(2, 3, 17, 16, device="mps", dtype=dtype)
    case = AttentionCase(tensor, tensor, tensor, ScaledDotProduct(), causal())
    for name in ("native", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "triton"):
        with pytest.raises(
            ValueError, match=rf"implementation='{name}' cannot be used here: .*got device=mps"
        ) as error:
            choose(name, case)
        assert "\n" not in str(error.value)
    assert [refusal(name, case) for name in ("reference", "sdpa")] == [None, None]
    assert choose("auto", case)[0] == "sdpa"
    assert choose("auto", replace(case, statistics=True))[0] == "reference"
