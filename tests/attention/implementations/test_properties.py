"""Properties that every implementation of attention has, on those that run on this machine.

test_reference.py holds the readable path to them more strictly.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from andrea.attention import (
    Additive,
    AttentionStatistics,
    Compatibility,
    DotProduct,
    Mask,
    MultiHeadAttention,
    ScaledDotProduct,
    attend,
    causal,
    key_padding,
)

IMPLEMENTATIONS = ("reference", "chunked", "sdpa", "triton")
MEASURING = ("reference", "chunked", "triton")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def function_for(implementation: str, width: int) -> Compatibility:
    """The plain dot product; where only the additive function is served, that one."""
    return Additive(width, width, 8) if implementation == "chunked" else DotProduct()


def weights_by(
    implementation: str, query: Tensor, key: Tensor, compatibility: Compatibility, mask: Mask | None = None
) -> Tensor:
    """The (T, S) weights of any implementation: what it retrieves from values that are unit vectors."""
    values = torch.eye(key.shape[-2], dtype=query.dtype).expand(*key.shape[:-1], key.shape[-2])
    return attend(query, key, values, compatibility=compatibility, mask=mask, implementation=implementation)


@pytest.mark.parametrize(("weights", "expected"), [((0.9, 0.1, 0.0), 1100.0), ((1.0, 0.0, 0.0), 1000.0)])
def test_retrieval(implementation, weights, expected):
    query, values = torch.tensor([weights]).log().clamp(min=-200), torch.tensor([[1000.0], [2000.0], [3000.0]])
    compatibility, key = DotProduct(), torch.eye(3)
    if implementation == "chunked":  # scores w·tanh(A q + B k): a key's own unit of the hidden layer reads the query
        compatibility = Additive(3, 3, 3)
        with torch.no_grad():
            compatibility.of_query.copy_(torch.zeros(3, 3))
            compatibility.of_key.copy_(20 * torch.eye(3))  # tanh(20) is 1: key j switches on hidden value j
            compatibility.weight.copy_(query[0])
    output = attend(query, key, values, compatibility=compatibility, implementation=implementation)
    assert output.item() == pytest.approx(expected, rel=1e-6)


def test_shapes(implementation):
    query, key, value = torch.randn(100, 10, 5), torch.randn(100, 20, 5), torch.randn(100, 20, 10)
    compatibility = function_for(implementation, 5)
    output = attend(query, key, value, compatibility=compatibility, implementation=implementation)
    assert output.shape == (100, 10, 10)
    assert weights_by(implementation, query, key, compatibility).shape == (100, 10, 20)


def test_causal_support_and_sums(implementation):
    query, key = torch.randn(2, 3, 13, 5), torch.randn(2, 3, 13, 5)
    weights = weights_by(implementation, query, key, function_for(implementation, 5), causal())
    visible = torch.ones(13, 13, dtype=torch.bool).tril()
    assert (weights[..., ~visible] == 0).all() and (weights[..., visible] > 0).all()
    assert torch.equal(weights[..., 0, :], torch.eye(13)[0].expand(2, 3, 13))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 13))


@pytest.mark.parametrize("position", [0, 6, 11])
def test_the_future_changes_nothing(implementation, position):
    """Bit by bit; our kernel and torch's have this property too, because their blocks stay the same."""
    query, key, value = torch.randn(3, 2, 2, 13, 16)
    compatibility = function_for(implementation, 16)
    how = {"compatibility": compatibility, "mask": causal(), "implementation": implementation}
    before = attend(query, key, value, **how)
    for tensor in (query, key, value):
        tensor[..., position + 1 :, :] = 100 * torch.randn_like(tensor[..., position + 1 :, :])
    after = attend(query, key, value, **how)
    assert torch.equal(before[..., : position + 1, :], after[..., : position + 1, :])
    assert not torch.equal(before[..., position + 1 :, :], after[..., position + 1 :, :])


def test_a_query_that_sees_no_key(implementation):
    tensors = [torch.randn(2, 1, 5, width, requires_grad=True) for width in (16, 16, 11)]
    how = {
        "compatibility": function_for(implementation, 16),
        "mask": key_padding(torch.tensor([[0], [3]])),
        "implementation": implementation,
    }
    output = attend(*tensors, **how)
    assert (output[0] == 0).all() and (output[1] != 0).all()
    output.square().sum().backward()
    assert all(tensor.grad.isfinite().all() and (tensor.grad[0] == 0).all() for tensor in tensors)
    if implementation in MEASURING:
        _, rows = attend(*tensors, **how, statistics=True)
        assert (rows.log_sum_exp[0] == -math.inf).all() and (rows.largest_logit[0] == -math.inf).all()
        assert (rows.entropy_nats[0] == 0).all() and (rows.entropy_nats[1] > 0).all()
        mean = rows.per_head()["entropy_nats"]
        assert mean[0].isnan().all()  # left out: there is nothing to average
        torch.testing.assert_close(mean[1], rows.entropy_nats[1].mean(-1))


@pytest.mark.parametrize("bias", [False, True])
def test_sum_over_heads(implementation, bias):
    torch.manual_seed(0)
    compatibility = Additive(5, 5, 8, 3) if implementation == "chunked" else ScaledDotProduct()
    attention = MultiHeadAttention(
        15, 3, compatibility=compatibility, mask=causal(), bias=bias, implementation=implementation
    )
    x = torch.randn(2, 7, 15)
    z = attention.retrieve(x)  # (B, H, T, D)
    by_head = torch.einsum("bhtd,hmd->bhtm", z, attention.output_by_head)
    total = by_head.sum(1) + (attention.output.bias if bias else 0)
    torch.testing.assert_close(total, attention(x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.float64, 1e-10)])
def test_shift_invariance(implementation, dtype, tolerance):
    if implementation == "triton" and dtype == torch.float64:
        pytest.skip("the kernel computes in fp32 at most")
    if implementation == "chunked":
        pytest.skip("an additive score is bounded by the sum of |w|: a constant of 1e4 cannot be added to it")
    query, key = torch.randn(11, 16, dtype=dtype), torch.randn(17, 16, dtype=dtype)
    one, level = torch.ones(11, 1, dtype=dtype), torch.full((17, 1), 1e4, dtype=dtype)
    query = torch.cat((query, one), -1)
    plain = weights_by(implementation, query, torch.cat((key, 0 * level), -1), DotProduct())
    shifted = weights_by(implementation, query, torch.cat((key, level), -1), DotProduct())
    assert shifted.isfinite().all()
    torch.testing.assert_close(shifted, plain, rtol=tolerance, atol=0)


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("implementation", MEASURING)
def test_entropy(implementation, spread):
    query, key, value = spread * torch.randn(1, 13, 16), torch.randn(1, 13, 16), torch.randn(1, 13, 16)
    compatibility = function_for(implementation, 16)
    if implementation == "chunked" and spread == 0:
        compatibility.weight.data.zero_()  # equal scores
    how = {"compatibility": compatibility, "mask": causal(), "implementation": implementation, "statistics": True}
    _, rows = attend(query, key, value, **how)
    assert isinstance(rows, AttentionStatistics)
    most = torch.arange(1, 14).log()
    assert (rows.entropy_nats >= -1e-6).all() and (rows.entropy_nats <= most + 1e-6).all()
    weights = weights_by(implementation, query, key, compatibility, causal()).double()
    by_hand = -torch.special.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close(rows.entropy_nats.double(), by_hand, atol=2e-6, rtol=0)
    if spread == 0:
        torch.testing.assert_close(rows.entropy_nats[0], most, atol=1e-6, rtol=0)
        torch.testing.assert_close(rows.per_head()["entropy_share"], torch.ones(1))
