"""Norms and MLPs, solved by hand or against torch's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from andrea.config import group_config
from andrea.model.gpt import gelu, make_mlp, make_norm, relu_squared, softcap

NANO = group_config("model", "andrea-nano")
TINY = replace(NANO, d_model=7, n_head=1, d_mlp=11, bias=False)


def test_activations_by_hand():
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert relu_squared(x).tolist() == [0.0, 0.0, 9.0]
    torch.testing.assert_close(gelu(x), nn.GELU(approximate="tanh")(x))


def test_rmsnorm_by_hand():
    norm = make_norm(replace(TINY, d_model=2, norm="rmsnorm", norm_epsilon=1e-12))
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 12.5**0.5)


@pytest.mark.parametrize("bias", [False, True])
def test_layernorm_has_a_bias_where_the_model_has(bias):
    norm = make_norm(replace(TINY, norm="layernorm", bias=bias))
    out = norm(torch.randn(5, 7))
    assert set(dict(norm.named_parameters())) == ({"weight", "bias"} if bias else {"weight"})
    torch.testing.assert_close(out.mean(-1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["relu2", "gelu", "gelu_exact", "swiglu"])
def test_mlp_is_the_formula(kind, bias):
    mlp, x = make_mlp(replace(TINY, mlp=kind, bias=bias)).double(), torch.randn(5, 7, dtype=torch.float64)
    up = mlp.up(x)
    inner = {"relu2": lambda: relu_squared(up), "gelu": lambda: gelu(up), "swiglu": lambda: up * gate * gate.sigmoid()}
    inner["gelu_exact"] = lambda: up * (1 + torch.erf(up / 2**0.5)) / 2
    gate = mlp.gate(x) if kind == "swiglu" else None
    torch.testing.assert_close(mlp(x), mlp.down(inner[kind]()))
    assert mlp.up.weight.shape == (11, 7) and mlp.down.weight.shape == (7, 11)
    assert any(name.endswith("bias") for name, _ in mlp.named_parameters()) == bias


def test_softcap_bends_in_fp32():
    logits = torch.tensor([0.0, 0.1, 15.0, 1e4, -1e4], dtype=torch.bfloat16)
    capped = softcap(logits, 15.0)
    assert capped.dtype == torch.float32
    torch.testing.assert_close(capped[[0, 3, 4]], torch.tensor([0.0, 15.0, -15.0]))
    assert capped[1].item() == pytest.approx(0.1, rel=1e-2)
    assert capped[2].item() == pytest.approx(15 * 0.76159, rel=1e-4)
