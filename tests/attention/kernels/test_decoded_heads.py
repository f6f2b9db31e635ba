"""Attention of one new token from a cache, under Triton's interpreter: outputs and what the cache gets, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from andrea.attention import (
    DotProduct,
    KeyValueCache,
    MultiHeadAttention,
    ScaledDotProduct,
    ScoreModifiers,
    SharedInputs,
    causal,
    multihead,
    sliding_window,
)
from andrea.model.gpt import RotaryPosition

pytestmark = pytest.mark.untraced

fused = pytest.importorskip("andrea.attention.kernels.decode_triton", reason="triton is not installed")
if not fused.triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)


@dataclass(frozen=True)
class Case:
    """H query heads, G key/value heads, D their width, K tokens that a convolution mixes, the lengths of B sequences."""

    H: int = 2
    G: int = 2
    D: int = 16
    K: int | None = 3
    lengths: tuple[int, ...] = (5,)
    norm: bool = True
    mixes: bool = True
    rotates: bool = True
    window: int | None = None
    is_ragged: bool = False
    gate: str | None = None


CASES = [
    Case(), Case(H=4, G=2, lengths=(0,)), Case(H=4, G=2, D=32, lengths=(41, 0, 67), is_ragged=True),
    Case(H=1, G=1, D=64, lengths=(70, 70), window=40), Case(K=None, norm=False, mixes=False, rotates=False, lengths=(33,)),
    Case(H=3, G=1, K=2, lengths=(2,), gate="elementwise"), Case(K=4, window=3, lengths=(2, 5), is_ragged=True),
]  # fmt: skip
CAPACITY = 80


def decoded(case: Case, dtype: torch.dtype, by_kernel: bool) -> list[Tensor]:
    """What the heads retrieve for two tokens, one after the other, and the filled cache, in float64."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:  # the same numbers in every type
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(dtype)

    layer = MultiHeadAttention(
        24, case.H, compatibility=ScaledDotProduct(), mask=sliding_window(case.window) if case.window else causal(),
        n_kv_head=case.G, d_head=case.D, convolution=case.K, value_residual=case.mixes, gate=case.gate,
        qk_norm_epsilon=1e-5 if case.norm else None,
    ).to(dtype)  # fmt: skip
    for parameter in layer.parameters():
        parameter.data = draw(*parameter.shape) / 4
    n_batch, n_projected = len(case.lengths), case.H + 2 * case.G if case.K else 0
    how = {"dtype": dtype, "fixed_shapes": True, "ragged": case.is_ragged, "n_projected": n_projected}
    cache = KeyValueCache(1, n_batch, case.G, CAPACITY, case.D, **how)
    kept = (*cache.keys, *cache.values, *cache.projected)
    for each in kept:
        each.copy_(draw(*each.shape))
    cache.set_lengths(list(case.lengths))
    position, results = RotaryPosition(CAPACITY, case.D, base=10.0), []
    with pytest.MonkeyPatch.context() as patches, torch.no_grad():
        patches.setattr(multihead, "one_product_is_faster", lambda x: by_kernel)
        patches.setattr(multihead, "one_pass_is_faster", lambda x: by_kernel)
        for _ in range(2):
            first = draw(n_batch, 1, case.G, case.D).transpose(1, 2) if case.mixes else None
            place = position.placer(1, cache.length) if case.rotates else None
            x = draw(n_batch, 1, 24)
            results.append(layer.retrieve(x, shared=SharedInputs(first_value=first, place=place), cache=cache.layer(0)))
            cache.advance(1)
    filled = torch.arange(CAPACITY) < cache.length.expand(n_batch)[:, None]
    return [each.double() for each in (*results, *(each.transpose(1, 2)[filled] for each in kept))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_cache_against_float64(case, dtype, monkeypatch):
    """The rule of design.md: at most twice the readable path's error, and one unit in the last place of the largest number."""
    monkeypatch.setattr(fused, "MOST_SPLITS", 4)  # interpreted programs are slow
    truth, readable, judged = (decoded(case, *how) for how in ((torch.float64, False), (dtype, False), (dtype, True)))
    assert len(truth) == len(judged) == (5 if case.K else 4)
    for number, (exact, theirs, mine) in enumerate(zip(truth, readable, judged, strict=True)):
        error, allowed = (float((other - exact).abs().max()) for other in (mine, theirs))
        last_place = torch.finfo(dtype).eps * float(exact.abs().max())
        assert error <= 2 * allowed + last_place, f"{number}: {error:.3g} > 2 · {allowed:.3g} + {last_place:.3g}"


def test_any_number_of_splits_gives_the_same(monkeypatch):
    assert [fused.splits_of(n_batch, 12) for n_batch in (1, 2, 64)] == [16, 8, 1]
    found = []
    for most in (1, 2, 8):
        monkeypatch.setattr(fused, "MOST_SPLITS", most)
        found.append(decoded(Case(H=1, G=1, lengths=(67,)), torch.float32, True))
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
    assert not serves(x, on_host) and not serves(x, None) and not serves(torch.randn(1, 2, 32), on_device)


def test_torch_can_trace_the_operator():
    cache = KeyValueCache(1, 2, 1, 8, 16, fixed_shapes=True, n_projected=4)
    inputs = torch.randn(2, 1, 4 * 16), torch.randn(4, 16, 3), torch.randn(2, 1, 1, 16), torch.rand(1), None, None
    kept = cache.keys[0], cache.values[0], cache.projected[0], cache.length
    torch.library.opcheck(fused.decoded_heads, (*inputs, *kept, 2, 8, 1e-6, 0.25))
