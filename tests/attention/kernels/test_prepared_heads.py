"""One pass from W_Q, W_K and W_V to attention, under Triton's interpreter: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch

from andrea.attention import DotProduct, MultiHeadAttention, Rotation, ScaledDotProduct, SharedInputs, causal, multihead

pytestmark = pytest.mark.untraced

fused = pytest.importorskip("andrea.attention.kernels.heads_triton", reason="triton is not installed")
if not fused.triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)

D_MODEL, BATCH = 24, 2
#        H  G  D   T    K  rotation, value residual
CASES = [
    (2, 1, 16, 7, 3, True, True), (3, 3, 32, 131, 3, True, True), (2, 2, 64, 65, 2, False, True),
    (1, 1, 128, 40, 4, True, False), (4, 2, 16, 1, 3, True, True), (2, 2, 16, 5, 1, False, False),
]  # fmt: skip


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def results(monkeypatch, case, dtype: torch.dtype, in_one_pass: bool, compatibility=ScaledDotProduct) -> list[torch.Tensor]:
    """Query, key and value, then the gradients of x, of the first values and of all parameters, in float64."""
    monkeypatch.setattr(multihead, "one_product_is_faster", lambda x: in_one_pass)
    monkeypatch.setattr(multihead, "one_pass_is_faster", lambda x: in_one_pass)
    n_head, n_group, width, n_token, n_mixed, rotates, mixes = case
    options = {"n_kv_head": n_group, "d_head": width, "qk_norm_epsilon": 1e-5, "value_residual": mixes}
    layer = MultiHeadAttention(
        D_MODEL, n_head, compatibility=compatibility(), mask=causal(), convolution=n_mixed, **options
    ).to(dtype)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed).div(4).to(dtype)
    x = draw(BATCH, n_token, D_MODEL, seed=91).to(dtype).requires_grad_()
    first = draw(BATCH, n_token, n_group, width, seed=92).to(dtype).transpose(1, 2).requires_grad_() if mixes else None
    angle = draw(n_token, width // 2, seed=93)
    turn = Rotation(torch.cat((angle.cos(),) * 2, -1).float(), torch.cat((-angle.sin(), angle.sin()), -1).float())
    parts = layer.project(x, shared=SharedInputs(first_value=first, place=turn if rotates else None))[:3]
    upstream = [draw(*part.shape, seed=94 + index).to(dtype) for index, part in enumerate(parts)]
    leaves = [x, *([first] if mixes else []), *layer.parameters()]
    gradients = torch.autograd.grad(parts, leaves, upstream, allow_unused=True)
    return [each.double() for each in (*parts, *gradients) if each is not None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_against_float64(monkeypatch, case):
    truth = results(monkeypatch, case, torch.float64, in_one_pass=False)
    assert len(truth) == 3 + 5 + 2 * case[-1]  # what is tested: x, W_Q, W_K, W_V and taps; the first values and their share
    for dtype in (torch.float32, torch.float16):
        readable = results(monkeypatch, case, dtype, in_one_pass=False)
        judged = results(monkeypatch, case, dtype, in_one_pass=True)
        for exact, theirs, mine in zip(truth, readable, judged, strict=True):
            slack = torch.finfo(dtype).eps * float(exact.abs().max())
            assert float((mine - exact).abs().max()) <= 2 * float((theirs - exact).abs().max()) + slack


def test_it_serves_the_plain_dot_product_and_no_other_function(monkeypatch):
    case = CASES[0]
    one, other = (results(monkeypatch, case, torch.float32, way, DotProduct) for way in (True, False))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, other, strict=True))


def test_what_it_does_not_serve_is_prepared_step_by_step(monkeypatch):
    """Documents, a cache, weights of the norm and hooks: the operator is not called."""
    monkeypatch.setattr(multihead, "one_pass_is_faster", lambda x: True)
    monkeypatch.setattr(fused, "prepared_heads", lambda *inputs: pytest.fail("the operator was called"))
    layer = MultiHeadAttention(32, 2, compatibility=ScaledDotProduct(), convolution=3, qk_norm_epsilon=1e-6)
    x = torch.randn(1, 4, 32)
    layer.project(x, shared=SharedInputs(document_place=torch.zeros(1, 4, dtype=torch.int64)))
    layer.project(x, x)
    layer.query.register_forward_hook(lambda *inputs: None)
    layer.project(x)
    MultiHeadAttention(
        32, 2, compatibility=ScaledDotProduct(), convolution=3, qk_norm_epsilon=1e-6, qk_norm_weights=True
    ).project(x)


def test_torch_can_trace_the_operator():
    inputs = torch.randn(1, 5, 4 * 16), torch.randn(4, 16, 3), torch.randn(1, 5, 1, 16), torch.rand(1), None, None
    inputs = [each if each is None else each.requires_grad_() for each in inputs]
    torch.library.opcheck(fused.prepared_heads, (*inputs, 2, 1e-6, 0.25))
