"""Attention of one new token from a cache, under Triton's interpreter: outputs and what the cache gets, against float64."""

from __future__ import annotations

import pytest
import torch
from oracle import DECODED_CASES, DecodedCase, decoded, judge_decoded

from andrea.attention import (
    DotProduct,
    KeyValueCache,
    MultiHeadAttention,
    ScaledDotProduct,
    ScoreModifiers,
    SharedInputs,
    causal,
    multihead,
)

pytestmark = pytest.mark.untraced

fused = pytest.importorskip("andrea.attention.kernels.decode_triton", reason="triton is not installed")
if not fused.triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", DECODED_CASES, ids=str)
def test_outputs_and_cache_against_float64(case, dtype, monkeypatch):
    monkeypatch.setattr(fused, "MOST_SPLITS", 4)  # interpreted programs are slow
    judge_decoded(case, dtype)


def test_any_number_of_splits_gives_the_same(monkeypatch):
    assert [fused.splits_of(n_batch, 12) for n_batch in (1, 2, 64)] == [16, 8, 1]
    found = []
    for most in (1, 2, 8):
        monkeypatch.setattr(fused, "MOST_SPLITS", most)
        found.append(decoded(DecodedCase(H=1, G=1, lengths=(67,)), torch.float32, True))
    assert all(torch.allclose(a, b, atol=1e-5) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    "option",
    [{"sink": True}, {"exclusive": "fixed"}, {"modifiers": ScoreModifiers(softcap=5.0)}, {"implementation": "reference"},
     {"qk_norm_epsilon": 1e-6, "qk_norm_weights": True}, {"compatibility": DotProduct()}],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_serve_is_computed_step_by_step(option, monkeypatch):
    """Options of heads, and every call that is not one new token after as many as the device knows."""
    monkeypatch.setattr(multihead, "one_pass_is_faster", lambda x: True)
    how = {"compatibility": ScaledDotProduct(), "mask": causal(), **option}
    layer, x = MultiHeadAttention(32, 2, **how), torch.randn(1, 1, 32)
    on_device, on_host = (KeyValueCache(1, 1, 2, 8, 16, fixed_shapes=fixed).layer(0) for fixed in (True, False))
    serves = lambda x, cache: layer.is_decoded_in_one_pass(x, SharedInputs(), cache)  # noqa: E731
    assert serves(x, on_device) == ("compatibility" in option)
    assert not serves(x, KeyValueCache(1, 1, 2, 2**25, 16, fixed_shapes=True, device="meta").layer(0))
    assert not serves(x, on_host) and not serves(x, None) and not serves(torch.randn(1, 2, 32), on_device)


def test_torch_can_trace_the_operator():
    cache = KeyValueCache(1, 2, 1, 8, 16, fixed_shapes=True, n_projected=4)
    inputs = torch.randn(2, 1, 4 * 16), torch.randn(4, 16, 3), torch.randn(2, 1, 1, 16), torch.rand(1), None, None
    kept = cache.keys[0], cache.values[0], cache.projected[0], cache.length
    torch.library.opcheck(fused.decoded_heads, (*inputs, *kept, 2, 8, 1e-6, 0.25))
