"""The public function: every implementation against the oracle, and what is refused."""

from __future__ import annotations

import pytest
import torch

from andrea.attention import (
    DotProduct,
    ScaledDotProduct,
    attend,
    attend_reference,
    attention_weights,
    causal,
    choose,
    key_padding,
)

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_errs_at_most_twice_what_eager_code_of_the_same_precision_errs(mask, dtype):
    inputs = tensors(29, 29, dtype)
    exact = attend(*(tensor.double() for tensor in inputs), mask=MASKS[mask], implementation="reference")
    eager = attend(*inputs, mask=MASKS[mask], implementation="reference")
    fast = attend(*inputs, mask=MASKS[mask], implementation="sdpa")
    last_place = torch.finfo(dtype).eps * exact.abs().max()
    assert (fast - exact).abs().max() <= 2 * (eager - exact).abs().max() + last_place


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
    """Figure 7, on every implementation."""
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
    query, key, _ = tensors(5, 13, torch.float32)
    assert choose("auto", query, key) == (
        "sdpa",
        "torch's fused kernels serve every compatibility function that lowers",
    )
    for name in ("sdpa", "reference"):
        assert choose(name, query, key) == (name, "asked for by name")


@pytest.mark.parametrize(
    ("n_key", "training", "expected"),
    [(512, True, "reference"), (513, True, "sdpa"), (512, False, "sdpa")],
)
def test_short_training_compiled_for_a_cpu_is_written_out(n_key, training, expected):
    @torch.compile(backend="eager", fullgraph=True, dynamic=False)
    def is_reference(query, key):
        return query.new_zeros(()) + (choose("auto", query, key)[0] == "reference")

    query, key, _ = tensors(3, n_key, torch.float32, lead=(), requires_grad=training)
    assert is_reference(query, key).item() == (expected == "reference")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation='flash' is unknown; allowed: auto, sdpa, reference"):
        attend(*tensors(5, 5, torch.float32), implementation="flash")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 7), (5, 3), (5, 7)), r"same width for a dot product, got query \(5, 7\) and key \(5, 3\)"),
        (((5, 7), (5, 7), (3, 7)), r"each key needs one value, got key \(5, 7\) and value \(3, 7\)"),
        (((2, 5, 7), (3, 5, 7), (3, 5, 7)), r"leading dimensions must be equal, got query \(2, 5, 7\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes))
