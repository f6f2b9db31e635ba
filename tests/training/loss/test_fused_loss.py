"""The fused loss, judged by the rule of oracle.py: it errs at most twice as much as the readable path, plus one unit in
the last place."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from andrea.config import AttentionConfig, group_config
from andrea.model import GPT, initialise
from andrea.runtime.device import autocast
from andrea.text.shards import IGNORED_TARGET
from andrea.training.loss import loss as fused
from andrea.training.loss.loss import MicroBatchLoss, loss_sum_from_hidden, training_loss_sum
from andrea.training.parallel.ranks import reuses_training_graph

V, CPU = 301, torch.device("cpu")
LOGITS = {name: getattr(fused, name) for name in ("LOGITS_IN_KERNEL", "LOGITS_COMPILED", "LOGITS_EAGER")}
CAP_AND_TIED = [(None, False), (15.0, False), (0.5, True), (41.0, False)]  # 41: above the kernel's LARGEST_FIXED


def make_model(cap: float | None, tied: bool) -> GPT:
    config = group_config("model", "andrea-nano", d_model=48, n_layer=1, tied_head=tied)
    model = GPT(replace(config, logit_softcap=cap), AttentionConfig("scaled_dot", "auto"), V)
    initialise(model, torch.Generator().manual_seed(0))
    return model


def results(loss, model: GPT, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss and gradients of a loss that is divided afterwards, as the trainer does."""
    leaf = hidden.to(dtype).requires_grad_()
    nats = loss(model, leaf, targets)
    gradients = torch.autograd.grad(nats / 7, [leaf, model.head_weight])
    return dict(zip(("nats", "d_hidden", "d_weight"), (nats.detach(), *gradients), strict=True))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows; for the kernel, in multiples of 4, and columns in multiples of 128."""
    for name in LOGITS:
        monkeypatch.setattr(fused, name, 10 * V)
    monkeypatch.setattr(fused, "ROW_MULTIPLE", 4)


@pytest.fixture(params=["torch", "native", "padded", pytest.param("kernel", marks=pytest.mark.untraced)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a chunk is computed: by torch, by our kernel for CPUs if it is bf16, or by that for GPUs under Triton's interpreter.

    padded: as for a vocabulary that is not small.
    """
    if request.param == "padded":
        monkeypatch.setattr(fused, "SMALL_VOCABULARY", 0)
    if request.param == "kernel":
        pytest.importorskip("triton")
        monkeypatch.setattr(fused, "uses_kernel", lambda rows: True)
    elif request.param == "torch":
        monkeypatch.setattr(fused, "has_native_library", lambda: False)
    elif not fused.has_native_library():
        pytest.skip("our kernel for CPUs needs a compiler and bf16 instructions")
    return request.param


def assert_errs_no_more_than_readable(loss, cap: float | None, tied: bool, precision: str) -> None:
    """loss: as `training_loss_sum`. Judged in fp32 or bf16, by the loss itself and by both gradients."""
    model = make_model(cap, tied)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 11, 48, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    targets = torch.randint(V, (3, 11), generator=generator)
    targets[0, :4] = targets[2, 10] = IGNORED_TARGET
    exact = results(loss_sum_from_hidden, model.double(), hidden, targets, torch.float64)
    model.float()
    with autocast(CPU, precision):
        readable = results(loss_sum_from_hidden, model, hidden, targets, torch.float32)
        fast = results(lambda *given: loss(*given, precision), model, hidden, targets, torch.float32)
    for name, truth in exact.items():
        error, allowed = ((other[name].double() - truth).abs().max() for other in (fast, readable))
        # In fp32 three units in the last place: how much torch's products err depends on the processor.
        unit = torch.finfo(torch.bfloat16).eps if precision == "bf16" else 3 * torch.finfo(torch.float32).eps
        assert fast[name].dtype == torch.float32 and error <= 2 * allowed + unit * truth.abs().max(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("cap", "tied"), CAP_AND_TIED)
def test_it_errs_no_more_than_the_readable_path(cap: float | None, tied: bool, precision: str, path: str) -> None:
    assert_errs_no_more_than_readable(training_loss_sum, cap, tied, precision)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("cap", "tied", "precision"),
    [
        (None, False, "bf16"),
        (0.5, True, "fp32"),
        pytest.param(None, False, "fp32", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(15.0, False, "fp32", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(15.0, False, "bf16", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(0.5, True, "bf16", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_compiled_it_errs_no_more_either(cap: float | None, tied: bool, precision: str) -> None:
    compiled = torch.compile(training_loss_sum, fullgraph=True, dynamic=False)
    assert_errs_no_more_than_readable(compiled, cap, tied, precision)


@pytest.mark.untraced
def test_compiled_with_a_padded_vocabulary_it_errs_no_more_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SMALL_VOCABULARY", 0)
    compiled = torch.compile(training_loss_sum, fullgraph=True, dynamic=False)
    assert_errs_no_more_than_readable(compiled, 15.0, True, "bf16")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_gradients_the_loss_is_the_same(precision: str, path: str) -> None:
    model, hidden, targets = make_model(15.0, False), torch.randn(3, 11, 48), torch.randint(V, (3, 11))
    with autocast(CPU, precision):
        with_gradients = training_loss_sum(model, hidden, targets, precision)
        with torch.no_grad():
            assert torch.equal(training_loss_sum(model, hidden, targets, precision), with_gradients)


def test_nothing_to_predict_is_no_loss_and_no_gradient(path: str) -> None:
    model, hidden = make_model(15.0, False), torch.randn(2, 5, 48)
    fast = results(
        lambda *given: training_loss_sum(*given, "fp32"),
        model,
        hidden,
        torch.full((2, 5), IGNORED_TARGET),
        torch.float32,
    )
    assert all(not tensor.any() for tensor in fast.values())


def test_fp16_keeps_the_readable_path() -> None:
    model, hidden = make_model(15.0, False), torch.randn(2, 5, 48)
    targets = torch.randint(V, (2, 5))
    assert torch.equal(training_loss_sum(model, hidden, targets, "fp16"), loss_sum_from_hidden(model, hidden, targets))


def test_the_trainers_loss_is_the_readable_one_and_one_graph() -> None:
    model, tokens = make_model(15.0, False), torch.randint(V, (3, 20))
    micro = MicroBatchLoss(model, CPU, "fp32", False, False)
    readable = loss_sum_from_hidden(model, model(tokens), tokens)
    compiled = torch.compile(micro, fullgraph=True, dynamic=False, backend="aot_eager")
    for loss in (micro, compiled):
        assert torch.allclose(loss(tokens, tokens)[0], readable, rtol=1e-6)
        loss(tokens, tokens)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.untraced
@pytest.mark.parametrize("cap", [None, 15.0, 41.0])
@pytest.mark.parametrize("kernel", ["triton", "native"])
def test_columns_that_are_no_tokens_change_nothing_and_get_no_gradient(kernel: str, cap: float | None) -> None:
    """Whatever stands in them, also where it would be the largest of its row."""
    if kernel == "native" and not fused.has_native_library():
        pytest.skip("our kernel for CPUs needs a compiler and bf16 instructions")
    pytest.importorskip("triton")
    dtype = torch.bfloat16 if kernel == "native" else torch.float32
    logits, targets = (torch.randn(5, V) * 9).to(dtype), torch.tensor([0, V - 1, IGNORED_TARGET, 7, 150])
    padded = torch.cat([logits, torch.full((5, 83), 1e4, dtype=dtype)], 1)
    truth, d_truth = fused.torch_loss_of_chunk(logits, targets, V, cap, True)
    of_chunk = fused.native_loss_of_chunk if kernel == "native" else fused.triton_loss_of_chunk
    nats, d_logits = of_chunk(padded, targets, V, cap, True)
    assert torch.allclose(nats, truth, rtol=1e-6) and not d_logits[:, V:].any()
    assert torch.allclose(d_logits[:, :V], d_truth, rtol=1e-4 if kernel == "triton" else 2**-7, atol=1e-6)


@pytest.mark.skipif(not fused.has_native_library(), reason="needs a compiler and bf16 instructions")
@pytest.mark.parametrize("cap", [None, 0.5, 15.0, 200.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0, 1e4])
@pytest.mark.parametrize("n_vocab", [7, 16, V])
def test_the_kernel_for_cpus_is_right_for_logits_of_any_size(n_vocab: int, spread: float, cap: float | None) -> None:
    """Against float64, from the same bf16 logits. Gradients are rounded to bf16."""
    generator = torch.Generator().manual_seed(4)
    logits = (spread * torch.randn(37, n_vocab, generator=generator)).bfloat16()
    targets = torch.randint(n_vocab, (37,), generator=generator)
    targets[3] = IGNORED_TARGET
    exact = logits.double().requires_grad_()
    capped = exact if cap is None else cap * torch.tanh(exact / cap)
    truth = cross_entropy(capped, targets, ignore_index=IGNORED_TARGET, reduction="sum")
    (d_truth,) = torch.autograd.grad(truth, exact)
    kept = logits.clone()
    evaluated, none = fused.native_loss_of_chunk(kept, targets, n_vocab, cap, False)
    assert none is None and torch.equal(kept, logits)
    nats, d_logits = fused.native_loss_of_chunk(logits, targets, n_vocab, cap, True)
    assert torch.equal(nats, evaluated) and nats.item() == pytest.approx(truth.item(), rel=2e-6, abs=1e-4)
    assert ((d_logits.double() - d_truth).abs() <= 2**-8 * d_truth.abs() + 1e-6).all()


@pytest.mark.skipif(not fused.has_native_library(), reason="needs a compiler and bf16 instructions")
@pytest.mark.parametrize("cap", [None, 15.0])
def test_the_kernel_for_cpus_hides_no_nan(cap: float | None) -> None:
    logits = torch.zeros(3, V).bfloat16()
    logits[1, 200] = float("nan")
    nats = fused.native_cross_entropy(logits, torch.tensor([1, 2, 3]), V, cap or 0.0, True)
    assert nats.isnan().tolist() == [False, True, False]
    assert logits.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.skipif(not fused.has_native_library(), reason="needs a compiler and bf16 instructions")
@pytest.mark.parametrize("target", [V, 1 << 40, -1])
def test_the_kernel_for_cpus_refuses_a_target_that_is_no_token(target: int) -> None:
    logits = torch.zeros(2, V).bfloat16()
    with pytest.raises(IndexError, match="no token of a vocabulary of 301"):
        fused.native_cross_entropy(logits, torch.tensor([3, target]), V, 15.0, True)
    assert not logits.any()


@pytest.mark.untraced
@pytest.mark.parametrize("spread", [1.0, 6.0, 40.0])
def test_a_gpus_own_tanh_errs_no_more_than_the_rounding_of_the_logits(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient of bf16 logits, against float64 before they were rounded.

    The interpreter has no such tanh. In its place stands one that errs as much as the GPU's may, by up to 2^-11.
    """
    pytest.importorskip("triton")
    from coarse_tanh import coarse_tanh

    from andrea.training.loss.kernels import cross_entropy_triton as cross_entropy

    generator = torch.Generator().manual_seed(3)
    exact = spread * torch.randn(64, V, generator=generator, dtype=torch.float64)
    rounded, targets = exact.bfloat16(), torch.randint(V, (64,), generator=generator)
    truth = fused.torch_loss_of_chunk(exact.clone(), targets, V, 15.0, True)
    by_rounding = fused.torch_loss_of_chunk(rounded.double(), targets, V, 15.0, True)
    monkeypatch.setattr(cross_entropy, "hardware_tanh", coarse_tanh)
    monkeypatch.setattr(cross_entropy, "has_hardware_tanh", lambda logits: logits.dtype == torch.bfloat16)
    found = fused.triton_loss_of_chunk(rounded.clone(), targets, V, 15.0, True)
    exact_tanh = fused.triton_loss_of_chunk(rounded.clone(), targets, V, 15.0, False)[0]
    by_rounding = by_rounding[0], by_rounding[1].bfloat16()  # as the kernel stores it
    for name, true, judge, ours in zip(("loss", "gradient"), truth, by_rounding, found, strict=True):
        allowed, error = (judge - true).norm(), (ours.double() - true).norm()
        assert error <= 2 * allowed, (name, float(error), float(allowed))
    assert torch.allclose(exact_tanh.double(), by_rounding[0].double(), rtol=1e-6)  # an evaluation's loss is exact


@pytest.mark.untraced
def test_a_soft_cap_that_is_reached_everywhere_leaves_the_sum_finite() -> None:
    """All logits at -cap: e^(-2 cap) is what the sum is made of, the smallest that the fixed maximum must hold."""
    pytest.importorskip("triton")
    from andrea.training.loss.kernels.cross_entropy_triton import LARGEST_FIXED

    logits = torch.full((2, V), -1e6)
    logits[1] = 1e6
    nats, d_logits = fused.triton_loss_of_chunk(logits, torch.tensor([3, 4]), V, LARGEST_FIXED, True)
    assert torch.allclose(nats, 2 * torch.tensor(float(V)).log(), rtol=1e-5) and not d_logits.any()


def test_with_the_kernel_columns_and_rows_are_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the products get: logits of 384 columns for 301 tokens, in chunks of 8 rows; the head's gradient is (V, d)."""
    shapes: list[tuple[int, ...]] = []

    def seen(logits: Tensor, targets: Tensor, n_vocab: int, *given) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(logits.shape))
        nats, d_logits = fused.torch_loss_of_chunk(logits[:, :n_vocab], targets, n_vocab, *given)
        return nats, torch.nn.functional.pad(d_logits, (0, logits.shape[1] - n_vocab))

    monkeypatch.setattr(fused, "uses_kernel", lambda rows: True)
    monkeypatch.setattr(fused, "triton_loss_of_chunk", seen)
    rows, weight, targets = torch.randn(33, 48), torch.randn(V, 48), torch.randint(V, (33,))
    _, d_rows, d_weight = fused.cross_entropy_in_chunks(rows, weight, targets, None, torch.float32, True)
    assert shapes == [(8, 384)] * 4 + [(1, 384)]
    assert d_rows.shape == rows.shape and d_weight.shape == weight.shape


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1 << 20))
def test_rows_are_divided_into_the_fewest_chunks_that_are_small_enough(n_row: int, n_vocab: int, n_logit: int) -> None:
    """A chunk exceeds n_logit by less than a row, or is a single row. No smaller number of chunks would do."""
    chunk = fused.rows_in_chunk(n_row, n_vocab, n_logit)
    n_chunk = -(-n_row // chunk)
    assert 1 <= chunk <= n_row
    assert chunk == 1 or (chunk - 1) * n_vocab < n_logit
    assert n_chunk <= max(1, -(-n_row * n_vocab // n_logit))
    assert n_chunk * chunk - n_row < n_chunk  # the last chunk is smaller than the others by less than a row for each


def test_the_fewer_copies_of_the_logits_the_larger_a_chunk() -> None:
    """The kernel holds one copy, compiled code two, eager code five; a chunk always has at least a row."""
    limits = [LOGITS[f"LOGITS_{way}"] for way in ("EAGER", "COMPILED", "IN_KERNEL")]
    rows = [fused.rows_in_chunk(1 << 14, 1 << 16, limit) for limit in limits]
    assert 1 < rows[0] < rows[1] < rows[2] < 1 << 14


@pytest.mark.parametrize(("gib", "dtype", "power"), [(141, "bfloat16", 28), (80, "bfloat16", 28), (79, "float32", 27),
                                                     (24, "bfloat16", 26), (8, "bfloat16", 25)])  # fmt: skip
def test_a_small_card_has_small_chunks(gib: int, dtype: str, power: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = lambda device: SimpleNamespace(total_memory=gib << 30)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(fused, "LOGITS_IN_KERNEL", LOGITS["LOGITS_IN_KERNEL"])
    assert fused.logits_in_kernel(torch.device("cuda"), getattr(torch, dtype)) == 1 << power
    assert fused.logits_in_kernel(torch.device("cpu"), torch.bfloat16) == LOGITS["LOGITS_IN_KERNEL"]


def test_a_chunk_has_at_most_as_many_logits_as_are_allowed(monkeypatch) -> None:
    """On the device `meta`, whose tensors have no memory."""
    torch_loss, sizes = fused.torch_loss_of_chunk, []

    def counted(logits: Tensor, *rest):
        sizes.append(logits.numel())
        return torch_loss(logits, *rest)

    monkeypatch.setattr(fused, "torch_loss_of_chunk", counted)
    monkeypatch.setattr(fused, "LOGITS_EAGER", LOGITS["LOGITS_EAGER"])
    n_row = 1 << 22
    hidden, weight = torch.empty(2, n_row // 2, 48, device="meta"), torch.empty(V, 48, device="meta")
    targets = torch.zeros(2, n_row // 2, dtype=torch.int64, device="meta")
    nats = fused.fused_cross_entropy(hidden, weight, targets, None, torch.float32)
    most = LOGITS["LOGITS_EAGER"]
    assert nats.shape == () and sum(sizes) == n_row * V
    assert len(sizes) == -(-n_row * V // most) and max(sizes) < most + V


@pytest.mark.untraced
def test_the_kernel_runs_on_the_gpu_that_holds_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU. There is none here, so this records what the launch stands in."""
    pytest.importorskip("triton")
    from andrea.training.loss.kernels import cross_entropy_triton as cross_entropy

    events: list[object] = []

    @contextmanager
    def device_of(tensor: Tensor):
        events.append(tensor.data_ptr())
        yield
        events.append("left")

    kernel = cross_entropy.row_kernel

    class Recorded:
        def __getitem__(self, grid):
            return lambda *given, **options: (events.append("launched"), kernel[grid](*given, **options))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(cross_entropy, "row_kernel", Recorded())
    logits = torch.randn(3, 7)
    cross_entropy.cross_entropy_of_rows(logits, torch.tensor([1, 2, 3]), 7, 0.0, False)
    assert events == [logits.data_ptr(), "launched", "left"]


@pytest.mark.parametrize(
    ("compile_", "device", "reuses"),
    [("on", "cpu", True), ("off", "cpu", False), ("on", "cuda", False), ("off", "cuda", False)],
)
def test_an_evaluation_on_a_gpu_has_a_graph_without_gradients(compile_, device, reuses):
    """Training's loss takes the GPU's approximate tanh, `gradients` says so; that of an evaluation is exact."""
    assert reuses_training_graph(compile_, torch.device(device)) == reuses
