"""Additive scores in chunks: the readable line's values and gradients, without its (T, S, n) tensor."""

from __future__ import annotations

import pytest
import torch

from andrea.attention import Additive, attend, causal
from andrea.attention.implementations import chunked

H, T, S, D_Q, D_K, N = 3, 13, 17, 5, 7, 11


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Chunks of two queries."""
    monkeypatch.setattr(chunked, "HIDDEN_AT_A_TIME", 2 * (2 * H * S * N))


def made(n_head=H):
    compatibility = Additive(D_Q, D_K, N, n_head).double()
    lead = (2, H)
    query, key = torch.randn(*lead, T, D_Q), torch.randn(*lead, S, D_K)
    return compatibility, query.double().requires_grad_(), key.double().requires_grad_()


@pytest.mark.parametrize("n_head", [H, None])
def test_scores_and_all_gradients_are_the_readable_lines(n_head, few_at_a_time):
    compatibility, query, key = made(n_head)
    inputs = (query, key, *compatibility.parameters())
    upstream = torch.randn(2, H, T, S, dtype=torch.float64)
    results = []
    for scores_of in (compatibility.scores, lambda q, k: chunked.additive_scores(compatibility, q, k)):
        scores = scores_of(query, key)
        results.append((scores, *torch.autograd.grad(scores, inputs, upstream)))
    torch.testing.assert_close(results[0], results[1])


def test_gradients_against_finite_differences(few_at_a_time):
    compatibility, query, key = made()
    value = torch.randn(2, H, S, 2, dtype=torch.float64, requires_grad=True)

    def output(query, key, value, *parameters):
        return attend(query, key, value, compatibility=compatibility, mask=causal(), implementation="chunked")

    inputs = [tensor[:1, :, :5] if tensor is query else tensor[:1, :, :7] for tensor in (query, key, value)]
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(output, (*inputs, *compatibility.parameters()))


def test_what_is_kept_for_the_backward_pass_is_small():
    """Nothing of size T × S × n, nor of any fraction of it above the T × S weights themselves."""
    compatibility, query, key = made()
    value = torch.randn(2, H, S, 2, dtype=torch.float64)
    largest = {}
    for implementation in ("reference", "chunked"):
        sizes = []

        def keep(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attend(query, key, value, compatibility=compatibility, implementation=implementation)
        largest[implementation] = max(sizes)
    assert largest["reference"] == 2 * H * T * S * N
    assert largest["chunked"] == 2 * H * T * S


def test_compiles_into_one_graph(few_at_a_time):
    compatibility, query, key = made()

    def loss(query, key):
        return attend(query, key, key, compatibility=compatibility, mask=causal()).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=False)
    expected, got = (torch.autograd.grad(run(query, key), (query, key)) for run in (loss, compiled))
    torch.testing.assert_close(got, expected)


def test_sixteen_bit_inputs_are_served():
    compatibility = Additive(8, 8, 8, H)
    query, key, value = torch.randn(3, 2, H, T, 8).bfloat16().requires_grad_()
    outputs = [
        attend(query, key, value, compatibility=compatibility, implementation=name) for name in ("auto", "reference")
    ]
    torch.testing.assert_close(*outputs, atol=3e-2, rtol=3e-2)
    outputs[0].sum().backward()
