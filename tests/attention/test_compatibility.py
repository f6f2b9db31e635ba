"""Compatibility functions: scores solved by hand, the method `lower`, and the variance that the scale gives."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from andrea.attention import (
    COMPATIBILITIES,
    Additive,
    Bilinear,
    Compatibility,
    Cosine,
    DotProduct,
    ScaledDotProduct,
    attend,
    causal,
    make_compatibility,
)
from andrea.config import UserError
from andrea.runtime.user_classes import allowing


def test_hand_solved_scores():
    query, key = torch.tensor([[1.0, 2.0, 0.0, 1.0]]), torch.tensor([[3.0, 4.0, 5.0, 1.0], [0.0, 0.0, 7.0, 0.0]])
    torch.testing.assert_close(DotProduct().scores(query, key), torch.tensor([[12.0, 0.0]]))
    torch.testing.assert_close(ScaledDotProduct().scores(query, key), torch.tensor([[6.0, 0.0]]))  # sqrt(4) = 2


def made(name, n_head=3, d_head=7):
    """The function in float64, away from where it starts."""
    compatibility = make_compatibility(name, n_head, d_head).double()
    with torch.no_grad():
        for parameter in compatibility.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return compatibility


def by_hand(name, compatibility, head, q, k):
    """f(q, k) of one query and one key, with numbers and loops."""
    q, k = q.tolist(), k.tolist()
    dot = sum(a * b for a, b in zip(q, k, strict=True))
    if name in ("dot", "scaled_dot"):
        return dot / (math.sqrt(len(q)) if name == "scaled_dot" else 1)
    if name == "bilinear":
        matrix = compatibility.matrix[head].tolist()
        return sum(q[i] * matrix[i][j] * k[j] for i in range(len(q)) for j in range(len(k)))
    if name == "cosine":
        return math.exp(compatibility.log_sharpness[head].item()) * dot / math.hypot(*q) / math.hypot(*k)
    of_query, of_key, weight = (part[head].tolist() for part in compatibility.parameters())
    hidden = [
        math.tanh(
            sum(a * x for a, x in zip(rows_a, q, strict=True)) + sum(b * y for b, y in zip(rows_b, k, strict=True))
        )
        for rows_a, rows_b in zip(of_query, of_key, strict=True)
    ]
    return sum(w * h for w, h in zip(weight, hidden, strict=True))


@pytest.mark.parametrize("name", COMPATIBILITIES)
def test_scores_by_hand_per_head(name):
    compatibility = made(name)
    query, key = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(2, 3, 11, 7, dtype=torch.float64)
    scores = compatibility.scores(query, key)
    assert scores.shape == (2, 3, 5, 11)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 10), (1, 1, 2, 7)):
        expected = by_hand(name, compatibility, h, query[b, h, i], key[b, h, j])
        assert scores[b, h, i, j].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in COMPATIBILITIES if name != "additive"])
def test_lowered_form_is_a_plain_dot_product_with_the_same_scores(name):
    compatibility = made(name)
    assert compatibility.lowers
    query, key = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(2, 3, 11, 7, dtype=torch.float64)
    lowered_query, lowered_key = compatibility.lowered(query, key)
    torch.testing.assert_close(lowered_query @ lowered_key.mT, compatibility.scores(query, key))


@pytest.mark.parametrize("name", [name for name in COMPATIBILITIES if name != "additive"])
@pytest.mark.parametrize("autocast", [False, True])
def test_lowering_is_computed_in_fp32_and_cast_last(name, autocast):
    """Each number of the lowered query is the exact one, rounded once."""
    compatibility = made(name).float()
    query, key = torch.randn(3, 5, 7).bfloat16(), torch.randn(3, 11, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        lowered = compatibility.lowered(query, key)
    exact = compatibility.lower(query.float(), key.float())
    for got, wanted in zip(lowered, exact, strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, wanted.bfloat16())


def test_the_additive_function_has_no_lowered_form():
    assert not Additive(3, 5, 7).lowers
    with pytest.raises(NotImplementedError, match="Additive has no method `lower`"):
        Additive(3, 5, 7).lower(torch.zeros(1, 3), torch.zeros(1, 5))


@pytest.mark.parametrize("make", [lambda: Bilinear(5, 7), lambda: Additive(5, 7, 11)])
def test_widths_may_differ_where_the_function_says_so(make):
    query, key, value = torch.randn(2, 13, 5), torch.randn(2, 17, 7), torch.randn(2, 17, 3)
    assert attend(query, key, value, compatibility=make(), mask=causal()).shape == (2, 13, 3)


def test_where_they_start():
    """Bilinear as the scaled dot product, cosine sharp, additive with scores of about unit variance."""
    query, key = torch.randn(3, 50, 64), torch.randn(3, 50, 64)
    torch.testing.assert_close(Bilinear(64, 64, 3).scores(query, key), ScaledDotProduct().scores(query, key))
    with_itself = Cosine(3).scores(query, query).diagonal(0, -2, -1)
    torch.testing.assert_close(with_itself, torch.full((3, 50), 10.0))
    assert 0.1 < make_compatibility("additive", 3, 64).scores(query, key).var() < 2


def test_queries_and_keys_begin_with_equal_parts_in_the_hidden_values():
    """Each has variance 1/2 there, whatever its width, so that their sum has variance 1; w has variance 1/n."""
    additive = Additive(29, 53, 2003, n_head=3)
    for transformed in additive.transformed(torch.randn(3, 41, 29), torch.randn(3, 37, 53)):
        assert transformed.var().item() == pytest.approx(0.5, rel=0.1)
    assert additive.weight.var().item() == pytest.approx(1 / 2003, rel=0.1)


def test_cosine_of_a_zero_vector_is_zero_with_a_finite_gradient():
    query, key = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    query[0, 3] = 0
    query.requires_grad_()
    scores = Cosine().scores(query, key)
    assert (scores[0, 3] == 0).all()
    scores.square().sum().backward()
    assert query.grad.isfinite().all() and (query.grad[0, 3] == 0).all()


@pytest.mark.parametrize("name", COMPATIBILITIES)
def test_gradients_against_finite_differences(name):
    compatibility = made(name, n_head=2, d_head=3)
    query, key, value = (torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))

    def output(query, key, value, *parameters):
        return attend(query, key, value, compatibility=compatibility, mask=causal(), implementation="reference")

    assert torch.autograd.gradcheck(output, (query, key, value, *compatibility.parameters()))


@pytest.mark.parametrize("implementation", ["sdpa", "triton"])
@pytest.mark.parametrize("name", ["bilinear", "cosine"])
def test_what_is_learned_gets_the_same_gradient_through_a_fused_path(name, implementation):
    compatibility = made(name, n_head=4, d_head=16).float()
    query, key, value = torch.randn(2, 4, 13, 16), torch.randn(2, 2, 13, 16), torch.randn(2, 2, 13, 16)
    gradients = [
        torch.autograd.grad(
            attend(query, key, value, compatibility=compatibility, mask=causal(), implementation=way).square().sum(),
            tuple(compatibility.parameters()),
        )
        for way in ("reference", implementation)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("d_k", [16, 64, 256, 4096])
def test_variance_of_random_scores(d_k):
    """q·k has variance d_k, the scaled score 1. The sampling error of a variance is sqrt(2 / n) of it."""
    generator = torch.Generator().manual_seed(d_k)
    n = 2000
    query, key = torch.randn(n, 1, d_k, generator=generator), torch.randn(n, 1, d_k, generator=generator)
    tolerance = 5 * (2 / n) ** 0.5
    assert DotProduct().scores(query, key).var().item() == pytest.approx(d_k, rel=tolerance)
    assert ScaledDotProduct().scores(query, key).var().item() == pytest.approx(1, rel=tolerance)


def test_what_learns_nothing_has_no_parameters():
    learned = {name: sum(p.numel() for p in make_compatibility(name, 3, 7).parameters()) for name in COMPATIBILITIES}
    assert learned == {"scaled_dot": 0, "dot": 0, "bilinear": 3 * 49, "cosine": 3, "additive": 3 * (49 + 49 + 7)}


class OfAUser(Compatibility):
    """The dot product times a factor per head; the subclasses make one mistake each."""

    def __init__(self, n_head):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(n_head))

    def scores(self, query, key):
        return query @ key.mT * self.factor[:, None, None]

    def lower(self, query, key):
        return query * self.factor[:, None, None], key


class Doubled(OfAUser):
    def lower(self, query, key):
        return 2 * query, key


class Forgetful(OfAUser):
    def lower(self, query, key):
        return query, key  # as long as the factor is 1, this is right


class OneCell(OfAUser):
    def scores(self, query, key):
        scores = super().scores(query, key)
        scores[0, 1, 2, 3] += 100
        return scores


class Transposed(OfAUser):
    def scores(self, query, key):
        return super().scores(query, key).mT


class NoTensor(OfAUser):
    def scores(self, query, key):
        return "scores"


class OnlyQuery(OfAUser):
    def lower(self, query, key):
        return query


class ManyKeys(OfAUser):
    def lower(self, query, key):
        return query, torch.cat([key, key], dim=-2)


class Narrow(OfAUser):
    def lower(self, query, key):
        return query, key[..., :-1]


class Unbounded(OfAUser):
    def scores(self, query, key):
        return (query @ key.mT * self.factor[:, None, None]).log()  # NaN for half of the cells

    lower = Compatibility.lower


def made_by_a_user(kind, **shape):
    path = f"{__name__}.{kind.__name__}"
    with allowing([path]):
        return make_compatibility(path, **{"n_head": 2, "d_head": 7, **shape})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Doubled,
            r"`lower` and `scores` differ: for query \d, key \d, head \d, `scores` gives (\S+), and .* is (\S+);",
        ),
        (Forgetful, "`lower` and `scores` differ"),
        (OneCell, "for query 2, key 3, head 1, `scores` gives"),
        (Transposed, r"the shape of scores must be \(2, 2, 3, 5\), .*, but it is \(2, 2, 5, 3\)"),
        (NoTensor, r"the shape of scores must be \(2, 2, 3, 5\), .*, but it is str"),
        (OnlyQuery, "`lower` must return a query and a key, got Tensor"),
        (ManyKeys, r"the shape of lower's key must be \(2, 2, 5, 7\), .*, but it is \(2, 2, 10, 7\)"),
        (Narrow, r"the shape of lower's key must be \(2, 2, 5, 7\), .*, but it is \(2, 2, 5, 6\)"),
    ],
)
def test_a_user_s_mistake_is_one_line_when_the_function_is_made(kind, message):
    with pytest.raises(UserError, match=message) as raised:
        made_by_a_user(kind)
    assert "\n" not in str(raised.value) and kind.__name__ in str(raised.value)
    if kind is Doubled:
        scores, lowered = map(float, re.search(message, str(raised.value)).groups())
        assert lowered == pytest.approx(2 * scores, rel=1e-3)


@pytest.mark.parametrize("shape", [{}, {"n_head": 6, "n_kv_head": 2}, {"d_head": 1}])
def test_a_sound_function_of_a_user_is_made_and_random_numbers_stay(shape):
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(made_by_a_user(OfAUser, **shape).factor, torch.ones(shape.get("n_head", 2)))
    assert made_by_a_user(Unbounded, **shape).lowers is False
    assert torch.equal(torch.rand(()), expected)


def test_it_is_tried_where_a_model_is_only_counted_too():
    with torch.device("meta"):
        assert made_by_a_user(OfAUser, n_head=3).factor.is_meta
        with pytest.raises(UserError, match="differ"):
            made_by_a_user(Doubled, n_head=3)
