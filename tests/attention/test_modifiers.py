"""Score modifiers and sinks: their formulas by hand, and every implementation that serves them against the readable one."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Case as OracleCase
from oracle import judge

from andrea.attention import (
    IMPLEMENTATIONS,
    Additive,
    Case,
    DotProduct,
    ScaledDotProduct,
    ScoreModifiers,
    alibi_slopes,
    attend,
    attention_weights,
    causal,
    choose,
    key_padding,
    refusal,
    sliding_window,
)

ALIBI, CAP = ScoreModifiers(alibi=True), ScoreModifiers(softcap=2.0)
BOTH = ScoreModifiers(softcap=2.0, alibi=True)


@pytest.mark.parametrize("n_head", [1, 2, 3, 5, 6, 7, 8, 12, 16, 24])
def test_slopes_follow_the_paper_s_rule(n_head):
    """Press et al.: 8 heads have 1/2, 1/4, …, 1/256; other numbers interpolate, by the recursion of the authors' code."""

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return [2 ** (-8 * (index + 1) / n) for index in range(n)]
        power = 2 ** math.floor(math.log2(n))
        return slopes(power) + slopes(2 * power)[0::2][: n - power]

    assert alibi_slopes(n_head, dtype=torch.float64).tolist() == pytest.approx(slopes(n_head), rel=1e-14)
    assert n_head != 8 or alibi_slopes(8).tolist() == [2.0**-power for power in range(1, 9)]


def test_alibi_by_hand():
    """Two heads with slopes 1/16 and 1/256; equal scores but for the distance; the queries stand at positions 1 and 2."""
    zeros = torch.zeros(2, 2, 4), torch.zeros(2, 3, 4)
    weights = attention_weights(*zeros, mask=causal(), modifiers=ALIBI)
    for head, slope in enumerate((1 / 16, 1 / 256)):
        expected = [[math.exp(-slope * (i - j)) if j <= i else 0 for j in range(3)] for i in (1, 2)]
        rows = torch.tensor(expected)
        torch.testing.assert_close(weights[head], rows / rows.sum(-1, keepdim=True))
    without_heads = attention_weights(torch.zeros(3, 4), torch.zeros(3, 4), modifiers=ALIBI)  # one head: 2^-8
    assert (without_heads[2, 0] / without_heads[2, 2]).item() == pytest.approx(math.exp(-2 / 256))
    assert torch.equal(without_heads, without_heads.flip(0, 1))  # a later key is as far as an earlier one


def test_a_cap_by_hand_and_before_the_distance():
    query, key = torch.tensor([[3.0]]), torch.tensor([[0.0], [1.0], [-50.0]])
    measured = attend(query, key, key, compatibility=DotProduct(), modifiers=CAP, statistics=True)[1]
    capped = [0.0, 2 * math.tanh(1.5), -2.0]
    assert measured.largest_logit.item() == pytest.approx(capped[1])
    assert measured.log_sum_exp.item() == pytest.approx(math.log(sum(map(math.exp, capped))))
    far = torch.zeros(1, 10_000, 1)
    weights = attention_weights(torch.zeros(1, 1, 1), far, modifiers=BOTH)[0, 0]
    assert (weights[0] / weights[-1]).item() == pytest.approx(math.exp(-9999 / 256), rel=1e-3)


def test_a_sink_by_hand():
    """Softmax-off-by-one with a logit of 0: two keys with scores 0 and ln 2 have weights 1/4 and 2/4, the sink 1/4."""
    query, key, value = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(2)]]), torch.tensor([[8.0], [100.0]])
    how = {"compatibility": DotProduct(), "sink": torch.tensor(0.0)}
    assert attention_weights(query, key, **how).tolist() == [pytest.approx([1 / 4, 2 / 4])]
    output, rows = attend(query, key, value, **how, statistics=True)
    assert output.item() == pytest.approx(52.0) and rows.sink_mass.item() == pytest.approx(1 / 4)
    assert rows.log_sum_exp.item() == pytest.approx(math.log(4)) and rows.first_token_mass.item() == pytest.approx(
        1 / 4
    )
    thirds = -(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3)  # the keys' own weights, 1/3 and 2/3
    assert rows.entropy_nats.item() == pytest.approx(thirds) and rows.per_head()["sink_mass"].item() == pytest.approx(
        1 / 4
    )


def test_a_sink_far_below_every_score_changes_nothing_and_one_far_above_takes_all():
    query, key, value = torch.randn(3, 2, 3, 11, 8)
    plain = attend(query, key, value, mask=causal())
    torch.testing.assert_close(attend(query, key, value, mask=causal(), sink=torch.full((3,), -1e9)), plain)
    assert not attend(query, key, value, mask=causal(), sink=torch.full((3,), 1e9)).any()


def test_a_sink_of_the_wrong_shape_is_refused():
    tensor = torch.randn(2, 3, 5, 8)
    with pytest.raises(ValueError, match=r"one logit for each query head, got sink \(2,\) and query \(2, 3, 5, 8\)"):
        attend(tensor, tensor, tensor, sink=torch.zeros(2))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_query_that_sees_no_key_has_no_weight_on_its_sink(implementation):
    query, key, value = (torch.randn(2, 2, 5, 16, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, requires_grad=True)
    how = {"mask": key_padding(torch.tensor([[0], [3]])), "sink": sink, "modifiers": BOTH}
    output, rows = attend(query, key, value, **how, implementation=implementation, statistics=True)
    assert not output[0].any() and not rows.sink_mass[0].any() and (rows.log_sum_exp[0] == -torch.inf).all()
    gradients = torch.autograd.grad(output.sum(), (query, key, value, sink))
    assert all(gradient.isfinite().all() for gradient in gradients) and not gradients[0][0].any()


HOW = {"cap": {"softcap": 1.5}, "ALiBi": {"alibi": True}, "sink": {"sink": True}}
HOW["all"] = {"softcap": 4.0, "alibi": True, "sink": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal", "causal & padding", "window & documents & padding"])
def test_torch_s_kernels_add_alibi_s_bias(mask, dtype):
    judge(OracleCase(2, 6, 3, 37, 37, 24, 16, mask, dtype, alibi=True), "sdpa")
    judge(OracleCase(2, 2, 2, 5, 41, 16, 16, mask, dtype, alibi=True), "sdpa")


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("mask", [None, causal(), sliding_window(3)])
def test_flex_agrees_with_the_reference_in_values(mask, how, monkeypatch):
    """On a CPU it has no backward pass, so it is refused there; values are compared all the same."""
    monkeypatch.setitem(IMPLEMENTATIONS, "flex", IMPLEMENTATIONS["flex"]._replace(refusal=lambda case: None))
    query, key, value = torch.randn(3, 2, 6, 16, 32)
    how = dict(how)
    called = {"mask": mask, "sink": torch.randn(6) if how.pop("sink", False) else None}
    called["modifiers"] = ScoreModifiers(**how) if how else None
    for n_query in (16, 5):
        results = [
            attend(query[:, :, -n_query:], key[:, :3], value[:, :3], **called, implementation=name)
            for name in ("flex", "reference")
        ]
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compatibility", [ScaledDotProduct(), Additive(4, 4, 3)], ids=["dot", "additive"])
@pytest.mark.parametrize("mask", [None, causal(), causal() & key_padding(torch.tensor([[4], [0]]))])
def test_gradients_in_float64(compatibility, mask):
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def attended(*tensors):
        *three, sink = tensors
        return attend(*three, compatibility=compatibility.double(), mask=mask, modifiers=BOTH, sink=sink)

    assert torch.autograd.gradcheck(attended, (query, key, value, sink), nondet_tol=0.0)


@pytest.mark.parametrize("how", ["an int", "a tensor", "one for each sequence"])
@pytest.mark.parametrize("modifiers", [ALIBI, BOTH])
def test_new_queries_stand_where_start_says(how, modifiers):
    """Part of a causal pass, as a cache leaves it: rows 7 .. 9 alone, with room for more keys behind them."""
    query, key, value = torch.randn(3, 2, 3, 12, 16)
    sink = torch.randn(3)
    whole = attend(query, key, value, mask=causal(), modifiers=modifiers, sink=sink)
    start = {"an int": 7, "a tensor": torch.tensor(7), "one for each sequence": torch.full((2, 1, 1), 7)}[how]
    part = attend(query[:, :, 7:10], key, value, mask=causal(), start=start, modifiers=modifiers, sink=sink)
    torch.testing.assert_close(part, whole[:, :, 7:10])


def case_of(device: str = "cpu", dtype: torch.dtype = torch.float32, **how) -> Case:
    tensor = torch.empty(1, 2, 600, 16, dtype=dtype, device="meta" if device == "meta" else device)
    return Case(tensor, tensor, tensor, ScaledDotProduct(), causal(), **how)


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ({"modifiers": CAP}, "reference", "torch's kernels do not cap scores"),
        ({"sink": torch.zeros(2)}, "reference", "torch's kernels have no sink in the softmax"),
        ({"modifiers": ALIBI}, "sdpa", "torch's fused kernels support"),
    ],
)
def test_auto_says_why(how, name, reason):
    chosen, why = choose("auto", case_of(**how))
    assert chosen == name and reason in why
    if name != "sdpa":
        with pytest.raises(ValueError, match=f"implementation='sdpa' cannot be used here: {reason}"):
            choose("sdpa", case_of(**how))
    assert "plain scores only" in refusal("native", case_of(**how))
