"""Our kernel under Triton's interpreter: values, gradients and statistics against float64, and its place in torch."""

from __future__ import annotations

import pytest
import torch
from oracle import MASKS, Case, everything, judge
from torch.utils.checkpoint import checkpoint

from andrea import attention
from andrea.attention import (
    ScaledDotProduct,
    ScoreModifiers,
    alibi_slopes,
    attend,
    causal,
    packed_documents,
)
from andrea.attention.implementations import triton as path
from andrea.attention.mask import visible_interval, visible_keys

pytestmark = pytest.mark.untraced

fused = pytest.importorskip("andrea.attention.kernels.attend_triton", reason="triton is not installed")
if not fused.triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)

#         B  H  G   T    S   d_k  d_v
SHAPES = [
    (2, 2, 2, 13, 13, 16, 16), (1, 3, 3, 31, 31, 24, 24), (2, 4, 2, 37, 37, 32, 32), (2, 2, 1, 7, 7, 17, 19),
    (1, 2, 2, 1, 29, 64, 64), (2, 2, 2, 5, 41, 40, 16), (1, 2, 2, 43, 11, 16, 40), (6, 3, 1, 1, 1, 16, 16),
    (1, 2, 1, 131, 131, 64, 64), (1, 1, 1, 67, 139, 128, 128), (1, 1, 1, 23, 23, 256, 256), (3, 6, 2, 17, 17, 48, 80),
]  # fmt: skip
OF_EACH_KIND = ("none", "causal", "window", "window & documents & padding")
# Each mask meets every second shape, in fp32 and in fp16 by turns: the interpreter takes a second for some of them.
CASES = [
    Case(*shape, mask, (torch.float32, torch.float16)[(index // 2 + turn) % 2])
    for index, shape in enumerate(SHAPES)
    for turn, mask in enumerate(MASKS[index % 2 :: 2])
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_gradients_and_statistics_against_float64(case):
    judge(case, "triton", measured=True)


MODIFIED = {
    "cap": {"softcap": 1.5},
    "ALiBi": {"alibi": True},
    "sink": {"sink": True},
    "all": {"softcap": 4.0, "alibi": True, "sink": True},
}


@pytest.mark.parametrize(
    ("mask", "how"), [("causal", "all"), ("window & documents & padding", "ALiBi"), ("none", "cap")]
)
def test_modified_scores_and_sinks_against_float64(mask, how):
    judge(Case(1, 2, 1, 13, 13, 16, 16, mask, **MODIFIED[how]), "triton", measured=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("how", MODIFIED.values(), ids=MODIFIED)
@pytest.mark.parametrize("mask", OF_EACH_KIND)
def test_modified_scores_and_sinks_of_many_shapes(mask, how):
    """Queries as many as the keys, fewer and more; a number of heads that is no power of two."""
    for shape, dtype in (((1, 6, 3, 37, 37, 24, 16), torch.float32), ((2, 2, 1, 5, 41, 16, 16), torch.float16)):
        judge(Case(*shape, mask, dtype, **how), "triton", measured=True)
    judge(Case(1, 3, 3, 43, 11, 16, 16, mask, **how), "triton")


@pytest.mark.slow
@pytest.mark.long
def test_modified_scores_in_many_small_tiles(monkeypatch):
    blocks = fused.Blocks(32, 16, 4, 1)
    small = fused.Tuning(blocks, fused.Blocks(16, 32, 4, 1), blocks)
    monkeypatch.setattr(fused, "tuning", lambda *tensors: small)
    judge(Case(1, 4, 2, 71, 71, 24, 40, "causal", **MODIFIED["all"]), "triton", measured=True)


def test_alibi_needs_the_position_of_the_first_query_on_the_host():
    tensor = torch.randn(1, 2, 3, 16)
    with pytest.raises(ValueError, match="position of the first query as an int, and it is a tensor here"):
        attend(
            tensor, tensor, tensor, start=torch.tensor(0), modifiers=ScoreModifiers(alibi=True), implementation="triton"
        )


@pytest.mark.parametrize("mask", OF_EACH_KIND)
def test_many_small_tiles(mask, monkeypatch):
    blocks = fused.Blocks(32, 16, 4, 1)
    monkeypatch.setattr(fused, "tuning", lambda *tensors: fused.Tuning(blocks, fused.Blocks(16, 32, 4, 1), blocks))
    judge(Case(2, 4, 2, 71, 71, 24, 40, mask), "triton")
    judge(Case(1, 2, 2, 19, 83, 16, 16, mask), "triton")


@pytest.mark.parametrize("mask", ["wide window", "long documents"])
def test_blocks_that_are_seen_whole_lie_between_blocks_with_a_mask(mask, monkeypatch):
    blocks = fused.Blocks(16, 16, 4, 1)
    monkeypatch.setattr(fused, "tuning", lambda *tensors: fused.Tuning(blocks, blocks, blocks))
    judge(Case(1, 2, 1, 131, 131, 16, 16, mask), "triton")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("width", [64, 128])
def test_the_tiles_of_every_card(capability, width, monkeypatch):
    """More keys and queries than a tile has, so that whole tiles and parts of tiles are computed."""
    monkeypatch.setattr(fused, "capability_of", lambda device: capability)
    judge(Case(1, 2, 1, 131, 139, width, width, "window & documents & padding", torch.float16), "triton")


@pytest.mark.parametrize("mask", OF_EACH_KIND)
def test_hoppers_copy_engine_reads_the_same_numbers(mask, monkeypatch):
    """From Hopper on, 16-bit tiles come through tensor descriptors; their bounds are the tensor's own."""
    monkeypatch.setattr(fused, "capability_of", lambda device: 90)
    used, described = [], fused.described
    monkeypatch.setattr(fused, "described", lambda *given: used.append(described(*given)) or used[-1])
    judge(Case(2, 4, 2, 71, 71, 24, 40, mask, torch.float16), "triton", measured=True)
    judge(Case(1, 2, 2, 19, 147, 64, 64, mask, torch.float16), "triton")
    assert [fits for *_, fits in used] == 6 * [True]


def test_what_the_copy_engine_cannot_read_is_read_by_address(monkeypatch):
    monkeypatch.setattr(fused, "capability_of", lambda device: 90)
    fits = torch.randn(1, 2, 5, 16).half()
    odd_stride, misaligned = torch.randn(1, 2, 5, 17).half()[..., :16], torch.randn(161).half()[1:].view(1, 2, 5, 16)
    assert fused.described(fits, fits, 16)[2]
    for tensor in (fits.float(), odd_stride, misaligned, fits[:1, :1, :1].expand(1, 2, 5, 16)):
        one, other, described = fused.described(fits.to(tensor.dtype), tensor, 16)
        assert other is tensor and not described
    output = attend(odd_stride, misaligned, fits, mask=causal(), implementation="triton")
    torch.testing.assert_close(
        output, attend(odd_stride, misaligned, fits, mask=causal(), implementation="reference"), atol=2e-3, rtol=2e-3
    )


def test_statistics_change_nothing_and_carry_no_gradient():
    query, key, value = torch.randn(3, 2, 2, 19, 16).requires_grad_()
    alone = attend(query, key, value, mask=causal(), implementation="triton")
    output, measured = attend(query, key, value, mask=causal(), implementation="triton", statistics=True)
    assert torch.equal(alone, output)
    assert not any(part is not None and part.requires_grad for part in vars(measured).values())


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_large_scores_cost_entropy_nothing(level):
    """A constant added to every score of a row: the naive lse - Σ p s would lose four digits, this form loses none."""
    query, key, value = torch.randn(3, 1, 1, 64, 16)
    shifted_query = torch.cat((query, torch.ones(1, 1, 64, 1)), -1)
    exact = None
    for offset in (0.0, level):
        shifted_key = torch.cat((key, torch.full((1, 1, 64, 1), 4.125 * offset)), -1)  # sqrt(17) is about 4.123
        _, measured = attend(shifted_query, shifted_key, value, implementation="triton", statistics=True)
        truth = attend(
            shifted_query.double(), shifted_key.double(), value.double(), implementation="reference", statistics=True
        )
        _, exact = truth
        # The scores themselves are known to 2^-11 at 1e4 in fp32; what matters is that no more is lost.
        torch.testing.assert_close(
            measured.entropy_nats, exact.entropy_nats.float(), rtol=0, atol=2e-3 if offset else 2e-6
        )
        naive = exact.log_sum_exp.float() - (exact.log_sum_exp - exact.entropy_nats).float()
        if offset:
            assert (naive - exact.entropy_nats).abs().max() > 2e-4


@pytest.mark.parametrize(("mask", "statistics"), [("causal", False), ("causal & documents", True)])
def test_the_operator_obeys_torchs_rules(mask, statistics):
    """Schema, fake tensors, autograd registration and AOT dispatch: torch.library.opcheck."""
    case = Case(2, 4, 2, 13, 13, 16, 24, mask)
    query, key, value, _ = (tensor.requires_grad_() for tensor in case.inputs(torch.float32))
    first = stop = None
    if mask != "causal":
        position = torch.arange(13)
        first, stop = (end.expand(2, 1, 13).int().contiguous() for end in (position // 5 * 5, position + 1))
    scoring = (2.5, alibi_slopes(4), torch.randn(4, requires_grad=True)) if statistics else (0.0, None, None)
    ranges = None if first is None else fused.query_ranges(query, value, first, stop)
    arguments = (query, key, value, first, stop, ranges, first is None, 0, *scoring, statistics)
    torch.library.opcheck(fused.fused_attention, arguments)


@pytest.mark.parametrize("mask", ["causal", "causal & documents"])
def test_compiles_into_one_graph_without_a_warning(mask, recwarn):
    case = Case(2, 4, 2, 37, 37, 16, 16, mask)

    def step(query, key, value):
        output, rows = attend(query, key, value, mask=case.made_mask(), implementation="triton", statistics=True)
        return output, rows.entropy_nats, rows.largest_logit, rows.previous_token_mass

    *leaves, upstream = case.inputs(torch.float32)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)):
        output, *measured = run(*leaves)
        results.append((output, *measured, *torch.autograd.grad(output, leaves, upstream)))
    torch.testing.assert_close(results[0], results[1])
    assert not [str(each.message) for each in recwarn if "Dynamo" in str(each.message)]  # once in a process


def test_inductor_compiles_it_too():
    query, key, value = torch.randn(3, 1, 2, 13, 16).requires_grad_()

    def loss(query, key, value):
        return attend(2 * query, key, value, mask=causal(), implementation="triton").square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=False)
    expected, got = (torch.autograd.grad(run(query, key, value), query)[0] for run in (loss, compiled))
    torch.testing.assert_close(got, expected)


def test_autocast_decides_the_type_as_it_does_for_torchs_own():
    query, key, value = torch.randn(3, 1, 2, 13, 16).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        output = attend(query, key, value, mask=causal(), implementation="triton")
    assert output.dtype == torch.float16
    output.float().square().sum().backward()
    torch.testing.assert_close(
        output.float(), attend(query, key, value, mask=causal(), implementation="reference"), atol=2e-3, rtol=2e-3
    )


def test_activation_checkpointing_gives_the_same_gradients():
    case = Case(1, 2, 2, 19, 19, 16, 16, "causal")
    plain = everything(case, "triton", torch.float32, False)

    def checkpointed(*inputs, **how):
        return checkpoint(lambda *leaves: attend(*leaves, **how), *inputs, use_reentrant=False)

    again = everything(case, "triton", torch.float32, False, checkpointed)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_tensors_as_a_fused_projection_leaves_them():
    """Strided views of one (B, T, 3 H D) matrix, and the output laid out as the next projection wants it."""
    packed = torch.randn(2, 13, 3 * 4 * 16)
    query, key, value = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in packed.chunk(3, -1))
    output = attend(query, key, value, mask=causal(), implementation="triton")
    assert output.transpose(1, 2).is_contiguous()
    expected = attend(query, key, value, mask=causal(), implementation="reference")
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        attend(query.mT.contiguous().mT, key, value, mask=causal(), implementation="triton"), expected
    )


@pytest.mark.parametrize(("lead", "n_query"), [((0, 2), 3), ((2, 2), 0)])
def test_nothing_in_nothing_out(lead, n_query):
    query, key = torch.randn(*lead, n_query, 16, requires_grad=True), torch.randn(*lead, 5, 16, requires_grad=True)
    output = attend(query, key, key, implementation="triton")
    assert output.shape == (*lead, n_query, 16)
    output.sum().backward()
    assert (key.grad == 0).all()


def test_blocks_that_nobody_sees_are_not_visited(monkeypatch):
    """The keys of other documents are NaN: reading one of them would spread NaN to the output."""
    documents = torch.arange(256) // 64
    query, key, value = (torch.randn(1, 1, n, 16) for n in (64, 256, 256))
    key[..., :192, :] = value[..., :192, :] = torch.nan  # three documents before the one of the queries
    output = attend(query, key, value, mask=causal() & packed_documents(documents[None, None]), implementation="triton")
    assert output.isfinite().all()


@pytest.mark.parametrize("mask", ["documents", "window", "causal & documents", "window & documents & padding"])
def test_the_ranges_of_queries_are_those_that_see_a_key_and_those_that_see_all(mask, monkeypatch):
    """Between the two, the kernel for dK and dV masks; elsewhere it computes nothing, or without a mask."""
    blocks = fused.Blocks(16, 2, 4, 1)
    monkeypatch.setattr(fused, "tuning", lambda *tensors: fused.Tuning(blocks, blocks, blocks))
    case = Case(3, 4, 2, 149, 149, 16, 16, mask)
    query, _, value, _ = case.inputs(torch.float32)
    ends = torch.broadcast_tensors(*visible_interval(case.made_mask(), 149, 149, 0, torch.device("cpu")))
    first, stop = (end.expand(3, 1, 149).int().contiguous() for end in ends)
    seen = visible_keys(case.made_mask(), 149, 149, 0, torch.device("cpu")).expand(3, 1, 149, 149)
    ranges, block = fused.query_ranges(query, value, first, stop), fused.tuning(query, value).keys.n
    row, found = torch.arange(149), 0
    for number, of_block in enumerate(ranges.unbind(2)):
        keys = seen[..., number * block : (number + 1) * block]
        low, full_low, full_high, high = (each[..., None] for each in of_block.unbind(-1))
        assert not (keys.any(-1) & ((row < low) | (row >= high))).any()
        assert torch.equal(keys.all(-1), (row >= full_low) & (row < full_high))
        found += int(keys.all(-1).sum())
    assert found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.bfloat16}, "interpreter computes bf16 wrongly"),
        ({"dtype": torch.float64}, "computes in fp32, fp16 and bf16, got torch.float64"),
        ({"width": 264}, "largest head width is 256, got 264"),
        ({"width_of_value": 272}, "largest head width is 256, got 272"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(change, reason):
    tensor = torch.randn(1, 1, 3, change.get("width", 16), dtype=change.get("dtype", torch.float32))
    value = tensor.new_zeros(1, 1, 3, change.get("width_of_value", tensor.shape[-1]))
    with pytest.raises(ValueError, match=f"implementation='triton' cannot be used here: .*{reason}"):
        attend(tensor, tensor, value, compatibility=ScaledDotProduct(), implementation="triton")


def test_without_a_card_it_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    tensor = torch.randn(1, 1, 3, 16)
    with pytest.raises(ValueError, match="it needs a CUDA GPU, got device=cpu"):
        attend(tensor, tensor, tensor, implementation="triton")


def test_outputs_that_span_more_than_2_to_the_31_elements_are_refused() -> None:
    """The inputs take no memory: all their rows are one. The output and the gradients would be laid out row by row."""
    heads, width = 4096, 16
    for n_query, n_key, served in ((2**15 - 1, 7, True), (2**15, 7, False), (7, 2**15 - 1, True), (7, 2**15, False)):
        query, key = (torch.zeros(1).expand(1, heads, rows, width) for rows in (n_query, n_key))
        reason = path.refusal(attention.Case(query, key, key, attention.DotProduct()))
        assert (reason is None) == served, (n_query, n_key)
        assert served or "2^31" in str(reason)
