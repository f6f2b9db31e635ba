"""The convolution equals torch's, keeps to documents, has right gradients, and continues from a cache."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad

from andrea.attention import KeyValueCache, MultiHeadAttention, ScaledDotProduct, SharedInputs, causal
from andrea.attention.implementations import native
from andrea.attention.mask import documents_of, packed_documents, places_in_documents
from andrea.attention.multihead import convolve, convolve_readable

B, H, T, D, K = 2, 3, 9, 4, 3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(n_kv_head: int | None = None, n_mixed: int = K) -> MultiHeadAttention:
    layer = MultiHeadAttention(
        H * D, H, compatibility=ScaledDotProduct(), mask=causal(), n_kv_head=n_kv_head, convolution=n_mixed
    ).double()
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
    return layer


def test_it_is_torch_s_depthwise_convolution_added_to_its_input():
    x, taps = draw(B, H, T, D), draw(H, D, K, seed=1)
    channels = x.transpose(2, 3).flatten(1, 2)  # (B, H*D, T)
    kernel = taps.flatten(0, 1).flip(-1)[:, None]
    expected = x + conv1d(pad(channels, (K - 1, 0)), kernel, groups=H * D).unflatten(1, (H, D)).transpose(2, 3)
    assert torch.allclose(convolve(x, taps), expected)


def test_taps_of_zero_change_no_bit():
    x = draw(B, H, T, D).float()
    assert torch.equal(convolve(x, torch.zeros(H, D, K)), x)


def test_gradients():
    x, taps = draw(1, 2, 4, 3).requires_grad_(), draw(2, 3, K, seed=1).requires_grad_()
    before, place = draw(1, 2, K - 1, 3, seed=2).requires_grad_(), torch.tensor([[0, 1, 0, 1]])
    assert torch.autograd.gradcheck(lambda *inputs: convolve(*inputs), (x, taps, before))
    assert torch.autograd.gradcheck(lambda *inputs: convolve(*inputs, None, place), (x, taps))


def test_a_document_is_mixed_with_no_other():
    tokens = torch.tensor([[5, 6, 0, 7, 8, 0, 0, 9, 4]])
    place = places_in_documents(tokens, end_of_text=0)
    assert place.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1, 2]]
    layer, x = attention(), draw(1, T, H * D)
    packing = packed_documents(documents_of(tokens, 0)[:, None])
    together = layer(x, shared=SharedInputs(packing=packing, document_place=place))
    for first, stop in ((0, 2), (2, 5), (5, 6), (6, 9)):
        assert torch.allclose(together[:, first:stop], layer(x[:, first:stop]))


@pytest.mark.parametrize("n_kv_head", [None, 1])
@pytest.mark.parametrize("n_mixed", [1, 2, 4])
@pytest.mark.parametrize("kind", ["int", "fixed", "ragged"])
def test_a_cache_continues_where_the_tokens_before_it_ended(n_kv_head, n_mixed, kind):
    layer, x = attention(n_kv_head, n_mixed), draw(B, T, H * D)
    n_kv = n_kv_head or H
    how = {"fixed_shapes": kind == "fixed", "ragged": kind == "ragged"}
    cache = KeyValueCache(1, B, n_kv, T, D, dtype=torch.float64, n_projected=H + 2 * n_kv, **how)
    pieces = []
    for first, stop in ((0, 1), (1, 2), (2, 6), (6, 9)):
        pieces.append(layer(x[:, first:stop], cache=cache.layer(0)))
        cache.advance(stop - first)
    assert torch.allclose(torch.cat(pieces, dim=1), layer(x))


def test_it_starts_as_plain_attention():
    plain = MultiHeadAttention(H * D, H, compatibility=ScaledDotProduct(), mask=causal())
    mixed = MultiHeadAttention(H * D, H, compatibility=ScaledDotProduct(), mask=causal(), convolution=K)
    mixed.load_state_dict(plain.state_dict(), strict=False)
    x = draw(B, T, H * D).float()
    assert torch.equal(mixed(x), plain(x))


@pytest.mark.parametrize("n_mixed", [1, 2, 3, 8])
@pytest.mark.parametrize("n_token", [1, 2, 37])
def test_the_kernel_errs_at_most_twice_as_much_as_the_readable_form(n_mixed, n_token):
    """Result and gradients in bf16, from a view of (B, T, H, D) as the model gives it; gradients of one that is not."""
    assert native.library() is not None or not torch.cpu._is_avx512_bf16_supported()
    if native.library() is None:
        pytest.skip("this processor has no bf16 instructions")
    x = draw(2, n_token, H, 32).transpose(1, 2).bfloat16()
    taps, d_y = draw(H, 32, n_mixed, seed=1).float(), draw(2, H, n_token, 32, seed=2).bfloat16()
    results = []
    for function, dtype in ((convolve, None), (convolve_readable, None), (convolve_readable, torch.float64)):
        inputs = [each.detach().to(dtype or each.dtype).requires_grad_() for each in (x, taps)]
        y = function(*inputs)
        y.backward(d_y.to(y.dtype))
        results.append([y.detach(), *(each.grad for each in inputs)])
    for ours, readable, exact in zip(*results, strict=True):
        unit = exact.abs().max() * torch.finfo(torch.bfloat16).eps
        assert (ours - exact).abs().max() <= 2 * (readable - exact).abs().max() + unit


def test_a_width_that_the_kernel_does_not_serve_takes_the_readable_form(monkeypatch):
    monkeypatch.setattr(native, "reason_without_library", lambda: None)
    monkeypatch.setattr(native, "native_convolution", lambda *inputs: pytest.fail("the kernel was called"))
    x, taps = draw(1, 1, 4, 24).bfloat16(), draw(1, 24, 2, seed=1).float()
    assert torch.equal(convolve(x, taps), convolve_readable(x, taps))
