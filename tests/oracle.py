"""The rule by which every fast path is judged (design.md): against float64 it may err at most twice what the readable
path errs in the same precision, plus one unit in the last place of the largest number it returns.

For the gradients of query and key that number is the largest they are made of, the gradient of a weight, dz·v (over
magnitudes, as the error of a sum goes). Every
fused kernel subtracts z·dz from it, which the readable path sums up as Σ p (dz·v) instead: where a query sees one key
the two are equal, the readable path's gradient is exactly zero, and a fused one's is what two sums of the same numbers
in another order differ by. (In 16 bits the readable path's own error is larger than that.)

B batch, H query heads, G key/value heads, T queries, S keys.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from andrea.attention import (
    KeyValueCache,
    Mask,
    MultiHeadAttention,
    ScaledDotProduct,
    ScoreModifiers,
    SharedInputs,
    attend,
    causal,
    key_padding,
    multihead,
    packed_documents,
    sliding_window,
)
from andrea.attention.compatibility import repeated_for_query_heads
from andrea.model.positions import RotaryPosition

STATISTICS = ("log_sum_exp", "largest_logit", "entropy_nats")
MASSES = ("first_token_mass", "previous_token_mass")


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    G: int
    T: int
    S: int
    d_k: int
    d_v: int
    mask: str
    dtype: torch.dtype = torch.float32
    draw: int = 0  # other numbers of the same shapes
    softcap: float | None = None
    alibi: bool = False
    sink: bool = False

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """Query, key, value and the upstream gradient, the same numbers in every type that can hold them."""
        generator = torch.Generator().manual_seed((hash((self.T, self.S, self.d_k)) + self.draw) % 2**31)
        shapes = (
            (self.B, self.H, self.T, self.d_k),
            (self.B, self.G, self.S, self.d_k),
            (self.B, self.G, self.S, self.d_v),
            (self.B, self.H, self.T, self.d_v),
        )
        rounded = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        return [tensor.to(device, dtype) for tensor in rounded]

    def made_modifiers(self) -> ScoreModifiers | None:
        return ScoreModifiers(self.softcap, self.alibi) if self.softcap or self.alibi else None

    def made_sink(self, dtype: torch.dtype, device: str = "cpu") -> Tensor | None:
        """Logits of the sinks (H,), in fp32 or higher, as a model's parameters are."""
        if not self.sink:
            return None
        drawn = torch.randn(self.H, generator=torch.Generator().manual_seed(self.T + self.draw))
        return drawn.to(device, torch.promote_types(dtype, torch.float32))

    def made_mask(self, device: str = "cpu") -> Mask | None:
        row = torch.arange(self.B, device=device)[:, None]
        lengths = (row * 7) % (self.S + 1)  # the first row of the batch sees nothing
        documents = torch.arange(self.S, device=device) // 5 + row[..., None]
        return {
            "none": None,
            "causal": causal(),
            "window": sliding_window(4),
            "padding": key_padding(lengths),
            "documents": packed_documents(documents.expand(self.B, 1, self.S)),
            "causal & padding": causal() & key_padding(lengths),
            "causal & documents": causal() & packed_documents(documents),
            "wide window": sliding_window(47),
            "long documents": causal() & packed_documents((torch.arange(self.S, device=device) + 13) // 59),
            "window & documents & padding": sliding_window(3) & packed_documents(documents) & key_padding(lengths),
        }[self.mask]


MASKS = (
    "none", "causal", "window", "padding", "documents", "causal & padding", "causal & documents",
    "window & documents & padding",
)  # fmt: skip


def everything(
    case: Case, implementation: str, dtype: torch.dtype, measured: bool, attend=attend, device: str = "cpu"
) -> dict[str, Tensor]:
    """Output, gradients and, where measured, statistics: by name, on the CPU."""
    *leaves, upstream = case.inputs(dtype, device)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    how = {"compatibility": ScaledDotProduct(), "mask": case.made_mask(device), "implementation": implementation}
    how["modifiers"] = case.made_modifiers()
    names = ("d_query", "d_key", "d_value")
    if case.sink:
        how["sink"] = case.made_sink(dtype, device).requires_grad_()
        names, leaves = (*names, "d_sink"), [*leaves, how["sink"]]
    arguments = leaves[:3]
    output, rows = attend(*arguments, statistics=True, **how) if measured else (attend(*arguments, **how), None)
    gradients = torch.autograd.grad(output, leaves, upstream)
    results = {"output": output.detach()} | dict(zip(names, gradients, strict=True))
    results |= {name: getattr(rows, name) for name in STATISTICS + MASSES} if rows else {}
    results |= {"sink_mass": rows.sink_mass} if rows and case.sink else {}
    return {name: tensor.cpu() for name, tensor in results.items()}


def judge(case: Case, implementation: str, measured: bool = False, attend_by=attend, device: str = "cpu") -> None:
    """Assert the two-times rule for every result of the case; infinities must be in the same places.

    The truth is computed on the CPU; the readable implementation and the judged one on `device`. A case of few queries has
    few numbers, of which the largest error is a matter of luck: it is judged by the largest over several draws. The
    gradient of the sinks is but one number for each head: it is judged by the root mean square over more draws.
    """
    errors = [
        errors_of(replace(case, draw=draw), implementation, measured, attend_by, device) for draw in draws_of(case)
    ]
    for name in errors[0].keys():
        combined = root_mean_square if name == "d_sink" else max
        error, allowed, last_place = (combined([float(of_draw[name][i]) for of_draw in errors]) for i in range(3))
        assert error <= 2 * allowed + last_place, f"{name}: {error:.3g} > 2 · {allowed:.3g} + {last_place:.3g}, {case}"


def draws_of(case: Case) -> range:
    return range(12 if case.sink else 8 if case.B * case.H * case.T < 16 else 1)


def root_mean_square(numbers: list[float]) -> float:
    return math.sqrt(sum(number**2 for number in numbers) / len(numbers))


def errors_of(
    case: Case, implementation: str, measured: bool, attend_by: Callable, device: str
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By result: the largest error, that of the readable implementation, one unit in the last place of the largest value."""
    truth = everything(case, "reference", torch.float64, measured)
    eager = everything(case, "reference", case.dtype, measured, device=device)
    fast = everything(case, implementation, case.dtype, measured, attend_by, device)
    errors = {}
    for name, exact in truth.items():
        assert fast[name].shape == exact.shape
        assert torch.equal(fast[name].isinf(), exact.isinf()), f"{name}: infinities of {case}"
        finite = ~exact.isinf()
        if not finite.any():
            continue
        differences = ((other[name].double() - exact)[finite] for other in (fast, eager))
        error, allowed = (
            difference.square().mean().sqrt() if name == "d_sink" else difference.abs().max()
            for difference in differences
        )
        in_fp32 = (*STATISTICS, *MASSES, "sink_mass", "d_sink")
        largest, kept_in = exact[finite].abs().max(), torch.float32 if name in in_fp32 else case.dtype
        if name in ("d_query", "d_key"):
            *_, value, upstream = case.inputs(torch.float64)
            largest = (upstream.abs() @ repeated_for_query_heads(value, upstream).abs().mT).max()
        if name in (*MASSES, "sink_mass"):  # e^(s - lse): as exact as a score and its log-sum-exp are
            largest = 4 * max(1, truth["log_sum_exp"].nan_to_num(neginf=0).abs().max())
        if name == "entropy_nats":  # of one key it is 0, from logarithms and sums of numbers near 1
            largest = max(largest, 1.0)
        errors[name] = error, allowed, torch.finfo(kept_in).eps * largest
    return errors


# ------------------------------------------------------------------------------------------------------ prepared heads


@dataclass(frozen=True)
class HeadsCase:
    """What lies between W_Q, W_K, W_V and attention: width D of a head, K tokens that the convolution mixes."""

    H: int
    G: int
    D: int
    T: int
    K: int
    rotates: bool
    mixes: bool  # value residual
    B: int = 2


HEADS_CASES = [
    HeadsCase(2, 1, 16, 7, 3, True, True), HeadsCase(3, 3, 32, 131, 3, True, True), HeadsCase(2, 2, 64, 65, 2, False, True),
    HeadsCase(1, 1, 128, 40, 4, True, False), HeadsCase(4, 2, 16, 1, 3, True, True), HeadsCase(2, 2, 16, 5, 1, False, False),
]  # fmt: skip


def prepared(
    case: HeadsCase, dtype: torch.dtype, in_one_pass: bool, device: str = "cpu", compatibility=ScaledDotProduct
) -> list[Tensor]:
    """Query, key and value of a layer, then the gradients of x, of the first values and of all parameters; float64, CPU."""
    with kernels_of_heads(in_one_pass):
        return [each.detach().cpu().double() for each in prepared_and_gradients(case, dtype, device, compatibility())]


@contextlib.contextmanager
def kernels_of_heads(are_used: bool) -> Iterator[None]:
    """Whether layers use our Triton kernels around attention, on any device."""
    before = multihead.one_product_is_faster, multihead.one_pass_is_faster
    multihead.one_product_is_faster = multihead.one_pass_is_faster = lambda x: are_used
    try:
        yield
    finally:
        multihead.one_product_is_faster, multihead.one_pass_is_faster = before


def prepared_and_gradients(case: HeadsCase, dtype: torch.dtype, device: str, compatibility) -> list[Tensor]:
    d_model = 24

    def draw(*shape: int, seed: int) -> Tensor:
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(torch.bfloat16).to(device, dtype)  # the same numbers in every type

    options = {"n_kv_head": case.G, "d_head": case.D, "qk_norm_epsilon": 1e-5, "value_residual": case.mixes}
    layer = MultiHeadAttention(
        d_model, case.H, compatibility=compatibility, mask=causal(), convolution=case.K, **options
    ).to(device, dtype)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed) / 4
    x = draw(case.B, case.T, d_model, seed=91).requires_grad_()
    first = draw(case.B, case.T, case.G, case.D, seed=92).transpose(1, 2).requires_grad_() if case.mixes else None
    turn = RotaryPosition(case.T, case.D, base=10.0, share=0.5).to(device).placer(case.T, 0)
    parts = layer.project(x, shared=SharedInputs(first_value=first, place=turn if case.rotates else None))[:3]
    upstream = [draw(*part.shape, seed=94 + index) for index, part in enumerate(parts)]
    leaves = [x, *([first] if case.mixes else []), *layer.parameters()]
    gradients = torch.autograd.grad(parts, leaves, upstream, allow_unused=True)
    return [*parts, *(each for each in gradients if each is not None)]


def judge_prepared(case: HeadsCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Assert the two-times rule for every result of the case."""
    truth, readable, judged = (
        prepared(case, *how) for how in ((torch.float64, False), (dtype, False, device), (dtype, True, device))
    )
    assert len(truth) == len(judged) == 3 + 5 + 2 * case.mixes
    for number, (exact, theirs, mine) in enumerate(zip(truth, readable, judged, strict=True)):
        error, allowed = (float((other - exact).abs().max()) for other in (mine, theirs))
        last_place = torch.finfo(dtype).eps * float(exact.abs().max())
        if exact.numel() == 1:  # the share's gradient, one sum in fp32: as exact as its many terms are large
            last_place += torch.finfo(torch.float32).eps * float(truth[4].abs().sum())
        assert error <= 2 * allowed + last_place, (
            f"{number}: {error:.3g} > 2 · {allowed:.3g} + {last_place:.3g}, {case}"
        )


# ------------------------------------------------------------------------------------------------------- decoded heads


@dataclass(frozen=True)
class DecodedCase:
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


DECODED_CASES = [
    DecodedCase(), DecodedCase(H=4, G=2, lengths=(0,)), DecodedCase(H=4, G=2, D=32, lengths=(41, 0, 67), is_ragged=True),
    DecodedCase(H=1, G=1, D=64, lengths=(70, 70), window=40), DecodedCase(H=3, G=1, K=2, lengths=(2,), gate="elementwise"),
    DecodedCase(K=None, norm=False, mixes=False, rotates=False, lengths=(33,)),
    DecodedCase(K=4, window=3, lengths=(2, 5), is_ragged=True),
]  # fmt: skip
DECODED_CAPACITY = 80


def decoded(case: DecodedCase, dtype: torch.dtype, by_kernel: bool, device: str = "cpu") -> list[Tensor]:
    """What the heads retrieve for two tokens, one after the other, and the filled cache, in float64."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:  # the same numbers in every type
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(device, dtype)

    layer = MultiHeadAttention(
        24, case.H, compatibility=ScaledDotProduct(), mask=sliding_window(case.window) if case.window else causal(),
        n_kv_head=case.G, d_head=case.D, convolution=case.K, value_residual=case.mixes, gate=case.gate,
        qk_norm_epsilon=1e-5 if case.norm else None,
    ).to(device, dtype)  # fmt: skip
    for parameter in layer.parameters():
        parameter.data = draw(*parameter.shape) / 4
    n_batch, n_projected = len(case.lengths), case.H + 2 * case.G if case.K else 0
    how = {"dtype": dtype, "device": device, "fixed_shapes": True, "ragged": case.is_ragged, "n_projected": n_projected}
    cache = KeyValueCache(1, n_batch, case.G, DECODED_CAPACITY, case.D, **how)
    kept = (*cache.keys, *cache.values, *cache.projected)
    for each in kept:
        each.copy_(draw(*each.shape))
    cache.set_lengths(list(case.lengths))
    position, results = RotaryPosition(DECODED_CAPACITY, case.D, base=10.0).to(device), []
    with kernels_of_heads(by_kernel), torch.no_grad():
        for _ in range(2):
            first = draw(n_batch, 1, case.G, case.D).transpose(1, 2) if case.mixes else None
            place = position.placer(1, cache.length) if case.rotates else None
            x = draw(n_batch, 1, 24)
            results.append(layer.retrieve(x, shared=SharedInputs(first_value=first, place=place), cache=cache.layer(0)))
            cache.advance(1)
    filled = torch.arange(DECODED_CAPACITY, device=device) < cache.length.expand(n_batch)[:, None]
    return [each.double().cpu() for each in (*results, *(each.transpose(1, 2)[filled] for each in kept))]


def judge_decoded(case: DecodedCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Assert the two-times rule for the outputs and for what the cache holds."""
    truth, readable, judged = (
        decoded(case, *how) for how in ((torch.float64, False), (dtype, False, device), (dtype, True, device))
    )
    assert len(truth) == len(judged) == (5 if case.K else 4)
    for number, (exact, theirs, mine) in enumerate(zip(truth, readable, judged, strict=True)):
        error, allowed = (float((other - exact).abs().max()) for other in (mine, theirs))
        last_place = torch.finfo(dtype).eps * float(exact.abs().max())
        assert error <= 2 * allowed + last_place, (
            f"{number}: {error:.3g} > 2 · {allowed:.3g} + {last_place:.3g}, {case}"
        )
