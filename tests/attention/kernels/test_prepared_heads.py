"""One pass from W_Q, W_K and W_V to attention, under Triton's interpreter: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from oracle import HEADS_CASES, judge_prepared, prepared

from andrea.attention import DotProduct, KeyValueCache, MultiHeadAttention, ScaledDotProduct, SharedInputs, multihead

pytestmark = pytest.mark.untraced

fused = pytest.importorskip("andrea.attention.kernels.heads_triton", reason="triton is not installed")
if not fused.triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", HEADS_CASES, ids=str)
def test_values_and_gradients_against_float64(case, dtype):
    judge_prepared(case, dtype)


def test_it_serves_the_plain_dot_product():
    one, other = (prepared(HEADS_CASES[0], torch.float32, way, compatibility=DotProduct) for way in (True, False))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, other, strict=True))


def test_what_it_does_not_serve_is_prepared_step_by_step(monkeypatch):
    """Documents, a cache, weights of the norm and hooks: the operator is not called."""
    monkeypatch.setattr(multihead, "one_pass_is_faster", lambda x: True)
    called, own = [], fused.prepared_heads
    monkeypatch.setattr(fused, "prepared_heads", lambda *inputs: called.append(1) or own(*inputs))
    layer = MultiHeadAttention(32, 2, compatibility=ScaledDotProduct(), convolution=3, qk_norm_epsilon=1e-6)
    x = torch.randn(1, 4, 32)
    layer.project(x)
    assert called.pop() and not called
    layer.project(x, cache=KeyValueCache(1, 1, 2, 8, 16, n_projected=6).layer(0))
    layer.project(x, shared=SharedInputs(document_place=torch.zeros(1, 4, dtype=torch.int64)))
    layer.project(x, x)
    layer.query.register_forward_hook(lambda *inputs: None)
    layer.project(x)
    for option in ({"qk_norm_weights": True}, {"implementation": "reference"}):
        MultiHeadAttention(
            32, 2, compatibility=ScaledDotProduct(), convolution=3, qk_norm_epsilon=1e-6, **option
        ).project(x)
    assert not called


@pytest.mark.parametrize(
    ("n_head", "n_token", "serves"), [(2, 2**19, True), (2, 2**20, False), (128, 2**16, False), (128, 2**15, True)]
)
def test_what_32_bits_cannot_count_is_prepared_step_by_step(n_head, n_token, serves, monkeypatch):
    monkeypatch.setattr(multihead, "one_pass_is_faster", lambda x: True)
    options = {"d_head": 128, "convolution": 3, "qk_norm_epsilon": 1e-6}
    layer = MultiHeadAttention(16, n_head, compatibility=ScaledDotProduct(), **options)
    x = torch.empty(1, n_token, 16, device="meta")
    assert layer.is_prepared_in_one_pass(x, SharedInputs()) == serves


def test_torch_can_trace_the_operator():
    inputs = torch.randn(1, 5, 4 * 16), torch.randn(4, 16, 3), torch.randn(1, 5, 1, 16), torch.rand(1), None, None
    inputs = [each if each is None else each.requires_grad_() for each in inputs]
    torch.library.opcheck(fused.prepared_heads, (*inputs, 2, 1e-6, 0.25))
