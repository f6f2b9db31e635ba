"""What may happen to a head's vector before W_O: by hand, against arithmetic head by head, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andrea.attention import MultiHeadAttention, ScaledDotProduct, attend, causal
from andrea.attention.cache import KeyValueCache
from andrea.attention.multihead import gate_of_logits, without_own_value

B, T, S, H, G, D = 2, 7, 11, 6, 3, 5
D_MODEL = H * D


def make(**options) -> MultiHeadAttention:
    """A layer whose options do something: what starts at zero is drawn."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(D_MODEL, H, compatibility=ScaledDotProduct(), mask=causal(), n_kv_head=G, **options)
    if layer.gate is not None:
        nn.init.normal_(layer.gate.weight, std=0.5)
    if layer.exclusive_share is not None:
        nn.init.normal_(layer.exclusive_share)  # heads differ
    return layer.double()


def vectors(n_token: int = T) -> torch.Tensor:
    return torch.randn(B, n_token, D_MODEL, dtype=torch.float64)


GATES = [{"gate": "scalar"}, {"gate": "elementwise"}]
OPTIONS = [*GATES, {"exclusive": "fixed"}, {"exclusive": "learned"}, {"exclusive": "learned", "gate": "elementwise"}]


def test_gates_by_hand() -> None:
    logits = torch.tensor([0.0, 3.0**0.5, -(3.0**0.5), 1e9, -1e9, 0.0]).view(1, 1, 6)
    by_head = gate_of_logits(logits, n_head=2)
    assert by_head.shape == (1, 2, 1, 3)
    share = 1 / (1 + torch.tensor(3.0).sqrt().exp())
    torch.testing.assert_close(by_head.flatten(), torch.tensor([1, 2 - 2 * share, 2 * share, 2, 0, 1]))
    assert gate_of_logits(logits, n_head=6).shape == (1, 6, 1, 1)


@pytest.mark.parametrize("options", GATES)
def test_each_head_is_multiplied_by_its_own_gate(options) -> None:
    layer, x = make(**options), vectors()
    total = torch.zeros_like(x)
    for head in range(H):
        own, group = slice(head * D, (head + 1) * D), slice(head // 2 * D, (head // 2 + 1) * D)
        query, key, value = (
            x @ part.weight[rows].T for part, rows in ((layer.query, own), (layer.key, group), (layer.value, group))
        )
        of_gate = layer.gate.weight[[head] if options["gate"] == "scalar" else own]
        gate = 2 * torch.sigmoid(x @ of_gate.T)  # (B, T, 1 or D)
        total += (gate * attend(query, key, value, mask=causal())) @ layer.output.weight[:, own].T
    torch.testing.assert_close(layer(x), total)


@pytest.mark.parametrize("options", GATES)
def test_a_gate_of_zero_logits_changes_no_bit_and_a_closed_one_silences_its_head(options) -> None:
    gated, plain, x = make(**options), make(), vectors()
    plain.load_state_dict({name: each for name, each in gated.state_dict().items() if "gate" not in name})
    with torch.no_grad():
        gated.gate.weight.zero_()
        assert torch.equal(gated(x), plain(x))
        x[..., 0] = 1
        gated.gate.weight[: 1 if options["gate"] == "scalar" else D, 0] = -1e9
        assert not gated.retrieve(x)[:, 0].any() and torch.equal(gated.retrieve(x)[:, 1:], plain.retrieve(x)[:, 1:])


def test_exclusion_by_hand() -> None:
    """Heads of one group share a value; z keeps what is at right angles to it, and all if the value is zero."""
    z = torch.tensor([[[[3.0, 4.0]], [[1.0, 7.0]], [[5.0, 6.0]], [[5.0, 6.0]]]])  # (1, 4, 1, 2)
    v = torch.tensor([[[[2.0, 0.0]], [[0.0, 0.0]]]])  # (1, 2, 1, 2)
    found = without_own_value(z, v)[0, :, 0]
    torch.testing.assert_close(found, torch.tensor([[0.0, 4.0], [0.0, 7.0], [5.0, 6.0], [5.0, 6.0]]), atol=1e-5, rtol=0)
    shares = torch.tensor([0.5, -1.0, 1.0, 0.0])
    found = without_own_value(z, v, shares)[0, :, 0]
    torch.testing.assert_close(found, torch.tensor([[1.5, 4.0], [2.0, 7.0], [5.0, 6.0], [5.0, 6.0]]), atol=1e-5, rtol=0)


def test_what_is_written_is_at_right_angles_to_the_token_s_own_value() -> None:
    layer, x = make(exclusive="fixed"), vectors()
    own = layer.values(x).repeat_interleave(H // G, 1)
    assert (layer.retrieve(x) * own).sum(-1).abs().max() < 1e-5 < (make().retrieve(x) * own).sum(-1).abs().max()
    assert layer.retrieve(x)[:, :, 0].abs().max() < 1e-4  # the first token sees its own value alone


def test_exclusion_in_16_bits_takes_its_dot_products_in_fp32() -> None:
    generator = torch.Generator().manual_seed(1)
    z, v = (torch.randn(3, 4, 5, 257, generator=generator, dtype=torch.float64) + 3 for _ in range(2))
    z, v = z.bfloat16(), v.bfloat16()
    exact, ours = without_own_value(z.double(), v.double()), without_own_value(z, v)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, exact.bfloat16()) or (ours - exact).abs().max() < 2**-6


def test_a_share_of_zero_excludes_nothing() -> None:
    layer, plain, x = make(exclusive="learned"), make(), vectors()
    plain.load_state_dict({name: each for name, each in layer.state_dict().items() if name != "exclusive_share"})
    with torch.no_grad():
        layer.exclusive_share.zero_()
    assert torch.equal(layer(x), plain(x))


def test_exclusion_is_for_self_attention() -> None:
    with pytest.raises(ValueError, match="exclusive attention needs self-attention"):
        make(exclusive="fixed")(vectors(), vectors(S))
    with pytest.raises(ValueError, match="exclusive='all' is unknown; allowed: None, fixed, learned"):
        make(exclusive="all")


def test_an_unknown_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="gate='open' is unknown; allowed: None, scalar, elementwise"):
        make(gate="open")


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options) -> None:
    layer = make(**options)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def output(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(1, 3, D_MODEL, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(output, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("implementation", ["sdpa", "auto"])
def test_implementations_agree(options, implementation) -> None:
    x = vectors()
    torch.testing.assert_close(
        make(**options, implementation=implementation)(x), make(**options, implementation="reference")(x)
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_with_a_cache_a_token_at_a_time(options, fixed_shapes) -> None:
    layer, x = make(**options), vectors()
    cache, outputs = KeyValueCache(1, B, G, S, D, dtype=torch.float64, fixed_shapes=fixed_shapes), []
    for chunk in x.split([3, 1, 1, 2], dim=1):
        outputs.append(layer(chunk, cache=cache.layer(0)))
        cache.advance(chunk.shape[1])
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x))


@pytest.mark.parametrize("options", OPTIONS)
def test_statistics_are_of_the_weights_and_the_gate_s_mean_comes_with_them(options) -> None:
    layer, plain, x = make(**options), make(), vectors()
    plain.load_state_dict({name: each for name, each in layer.state_dict().items() if name in plain.state_dict()})
    output, measured = layer(x, statistics=True)
    torch.testing.assert_close(output, layer(x))
    _, of_weights = plain(x, statistics=True)
    assert of_weights.gate is None and "gate_mean" not in of_weights.figures()
    for name, figure in of_weights.figures().items():
        torch.testing.assert_close(measured.figures()[name], figure)
    if "gate" in options:
        torch.testing.assert_close(
            measured.figures()["gate_mean"].double(), layer.gates(x).mean((2, 3)), atol=1e-6, rtol=1e-6
        )
