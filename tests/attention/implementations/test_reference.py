"""The readable path: cases solved by hand, and properties that follow from the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from andrea.attention import DotProduct, ScaledDotProduct, attend_reference, attention_weights, causal, key_padding


def reference(query, key, value, mask=None, compatibility=None):
    start = key.shape[-2] - query.shape[-2]
    return attend_reference(query, key, value, compatibility or ScaledDotProduct(), mask, start)


@pytest.mark.parametrize(("weights", "expected"), [((0.9, 0.1, 0.0), 1100.0), ((1.0, 0.0, 0.0), 1000.0)])
def test_retrieval(weights, expected):
    """The keys are unit vectors, so the scores are the query's entries; a score of ln(weight) gives that weight."""
    query = torch.tensor([weights], dtype=torch.float64).log()
    query = query.clamp(min=-1000)  # exp(-1000) is 0 in float64
    values = torch.tensor([[1000.0], [2000.0], [3000.0]], dtype=torch.float64)
    result = reference(query, torch.eye(3, dtype=torch.float64), values, compatibility=DotProduct())
    torch.testing.assert_close(result.weights, torch.tensor([weights], dtype=torch.float64))
    assert result.output.item() == pytest.approx(expected, rel=1e-12)


def test_shapes():
    result = reference(torch.randn(100, 10, 5), torch.randn(100, 20, 5), torch.randn(100, 20, 10))
    assert result.output.shape == (100, 10, 10)
    assert result.weights.shape == result.scores.shape == (100, 10, 20)


def test_two_keys_solved_by_hand():
    """Scores 0 and 1 give weights 1/(1+e) and e/(1+e)."""
    result = reference(torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]))
    assert result.output.item() == pytest.approx(math.e / (1 + math.e), rel=1e-6)


def test_causal_support_first_row_and_sums():
    weights = attention_weights(torch.randn(2, 3, 13, 5), torch.randn(2, 3, 13, 5), mask=causal())
    visible = torch.ones(13, 13, dtype=torch.bool).tril()
    assert (weights[..., ~visible] == 0).all()
    assert (weights[..., visible] > 0).all()
    assert torch.equal(weights[..., 0, :], torch.eye(13)[0].expand(2, 3, 13))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 13))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 4, 11])
def test_the_future_changes_nothing_bitwise(position, dtype):
    """Everything after `position` is replaced by large numbers."""
    query, key, value = (torch.randn(2, 13, width, dtype=dtype) for width in (5, 5, 7))
    before = reference(query, key, value, causal()).output
    for tensor in (query, key, value):
        tensor[:, position + 1 :] = 100 * torch.randn_like(tensor[:, position + 1 :])
    after = reference(query, key, value, causal()).output
    assert torch.equal(before[:, : position + 1], after[:, : position + 1])
    assert not torch.equal(before[:, position + 1 :], after[:, position + 1 :])


def test_a_query_that_sees_no_key_retrieves_zeros_with_finite_gradients():
    """One sequence of the batch is padding alone, the other has 3 keys."""
    tensors = [torch.randn(2, 5, width, requires_grad=True) for width in (7, 7, 11)]
    result = reference(*tensors, key_padding(torch.tensor([0, 3])))
    assert (result.output[0] == 0).all() and (result.weights[0] == 0).all()
    assert (result.scores[0] == -math.inf).all()
    torch.testing.assert_close(result.weights[1].sum(-1), torch.ones(5))
    result.output.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in tensors)
    assert all((tensor.grad[0] == 0).all() and (tensor.grad[1] != 0).any() for tensor in tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.float64, 1e-10)])
def test_adding_a_constant_to_a_row_of_scores_changes_nothing(dtype, tolerance):
    """An extra entry of the query is multiplied by a key entry that is 1e4 for every key, or 0 for every key."""
    query, key = torch.randn(11, 5, dtype=dtype), torch.randn(17, 5, dtype=dtype)
    one, level = torch.ones(11, 1, dtype=dtype), torch.full((17, 1), 1e4, dtype=dtype)
    query = torch.cat((query, one), -1)
    plain = attention_weights(query, torch.cat((key, 0 * level), -1), compatibility=DotProduct())
    shifted = attention_weights(query, torch.cat((key, level), -1), compatibility=DotProduct())
    assert shifted.isfinite().all()
    torch.testing.assert_close(shifted, plain, rtol=tolerance, atol=0)


def test_entropy_lies_between_zero_and_the_log_of_the_visible_keys():
    """In nats."""
    visible_keys = torch.arange(1, 14, dtype=torch.float64)
    for query in (torch.zeros(13, 5, dtype=torch.float64), 3 * torch.randn(13, 5, dtype=torch.float64)):
        weights = attention_weights(query, torch.randn(13, 5, dtype=torch.float64), mask=causal())
        entropy_nats = -torch.special.xlogy(weights, weights).sum(-1)
        assert (entropy_nats >= 0).all() and (entropy_nats <= visible_keys.log() + 1e-12).all()
        if not query.any():  # uniform scores
            torch.testing.assert_close(entropy_nats, visible_keys.log())


def test_the_softmax_runs_in_fp32_or_in_the_inputs_precision_if_higher():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        result = reference(*(torch.randn(3, 5, dtype=dtype) for _ in range(3)))
        assert result.weights.dtype == result.scores.dtype == expected
        assert result.output.dtype == dtype


def test_gradients_against_finite_differences():
    tensors = [
        torch.randn(2, n, width, dtype=torch.float64, requires_grad=True) for n, width in ((3, 5), (7, 5), (7, 2))
    ]
    assert torch.autograd.gradcheck(lambda q, k, v: reference(q, k, v, causal()).output, tensors)
    assert torch.autograd.gradgradcheck(lambda q, k, v: reference(q, k, v, causal()).output, tensors)
