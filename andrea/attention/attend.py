"""`attend`, the public function, checks the shapes, chooses an implementation and runs it. `choose` makes the choice.

T queries, S keys, widths d_q (query), d_k (key) and d_v (value), H query heads, G key/value heads (G divides H), any
leading dimensions in front.

In this example the keys are unit vectors, so the scores are the query's own entries:

>>> import torch
>>> from andrea.attention import DotProduct, attend, attention_weights
>>> query, key = torch.tensor([[0.9, 0.1, 1e-30]]).log(), torch.eye(3)
>>> value = torch.tensor([[1000.0], [2000.0], [3000.0]])
>>> attention_weights(query, key, compatibility=DotProduct()).round(decimals=4)
tensor([[0.9000, 0.1000, 0.0000]])
>>> attend(query, key, value, compatibility=DotProduct()).round()
tensor([[1100.]])
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from andrea.attention.compatibility import Additive, Case, Compatibility, Result, ScaledDotProduct
from andrea.attention.implementations import chunked, flex, native, reference, sdpa, triton
from andrea.attention.implementations.reference import attend_reference
from andrea.attention.mask import Mask
from andrea.attention.modifiers import ScoreModifiers
from andrea.attention.statistics import AttentionStatistics
from andrea.config import MEASURES_HEADS

SCALED_DOT_PRODUCT = ScaledDotProduct()
# Up to this number of keys, compiled training on a CPU is faster with `reference` than with torch's fused kernel.
WRITTEN_OUT_KEYS = 512


class Implementation(NamedTuple):
    # Why it cannot serve the case, or None. What the fused kernels have in common is checked by `refusal`, below.
    refusal: Callable[[Case], str | None]
    run: Callable[[Case], Result]


IMPLEMENTATIONS = {
    "reference": Implementation(reference.refusal, reference.run),
    "chunked": Implementation(chunked.refusal, chunked.run),
    "native": Implementation(native.refusal, native.run),
    "sdpa": Implementation(sdpa.refusal, sdpa.run),
    **{
        name: Implementation(functools.partial(sdpa.refusal, backend=name), functools.partial(sdpa.run, backend=name))
        for name in sdpa.SDPA_BACKENDS
    },
    "flex": Implementation(flex.refusal, flex.run),
    "triton": Implementation(triton.refusal, triton.run),
}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    start: int | Tensor | None = None,
    modifiers: ScoreModifiers | None = None,
    sink: Tensor | None = None,
    implementation: str = "auto",
    statistics: bool = False,
) -> Tensor | tuple[Tensor, AttentionStatistics]:
    """query (..., H, T, d_q), key (..., G, S, d_k), value (..., G, S, d_v) -> output (..., H, T, d_v).

    The output is the mean of the values, weighted by the softmax of the scores (Vaswani et al. 2017, arXiv 1706.03762,
    eq. 1). Each key/value head serves H / G query heads (Ainslie et al. 2023, arXiv 2305.13245). The other leading
    dimensions of the three tensors are equal. Raises ValueError if the shapes do not fit together.
    start: position of the first query among the keys; S - T if None. A 0-d integer tensor lets one compiled graph serve
    every position of a preallocated cache. A tensor (B, 1, 1) gives each sequence its own position.
    modifiers: a soft cap on the scores, or ALiBi, or both (modifiers.py); None for neither.
    sink: a logit for each query head, (H,), 0-dim without heads, that takes part in the softmax's denominator but has no
    value, so that the weights sum to less than 1 (gpt-oss: OpenAI 2025, arXiv 2508.10925, section 2.2; with a logit of 0:
    Xiao et al. 2023, arXiv 2309.17453, eq. 2).
    implementation: one of the following names. Raises ValueError if the named implementation cannot compute this call.
      auto       the fastest implementation that can compute this call
      reference  the textbook formula, for every compatibility function, and for gradients of gradients too
      chunked    the additive function, without storing its (T, S, n) tensor of hidden values
      native     our fused kernels for CPUs: causal, in bf16 or fp32
      sdpa       torch's choice among its fused kernels; sdpa_flash, sdpa_efficient, sdpa_cudnn: one of them (CUDA)
      flex       torch's FlexAttention (CUDA)
      triton     our fused kernel (CUDA)
    statistics: return (output, AttentionStatistics). `triton` computes log-sum-exp, largest logit and entropy together
    with the output, and derives the weights of the first and the previous token from the log-sum-exp.
    `reference` and `chunked` compute the statistics from the full scores (..., T, S). The other implementations return
    no statistics.

    >>> import torch
    >>> from andrea.attention import causal
    >>> query, key, value = torch.randn(3, 2, 8, 7, 16)  # 2 sequences, 8 heads, 7 tokens, head width 16
    >>> output, measured = attend(query, key, value, mask=causal(), statistics=True)
    >>> output.shape, measured.entropy_nats.shape
    (torch.Size([2, 8, 7, 16]), torch.Size([2, 8, 7]))
    """
    case = Case(query, key, value, compatibility, mask, start, statistics, modifiers=modifiers, sink=sink)
    check_shapes(case)
    name, _ = choose(implementation, case)
    output, measured = IMPLEMENTATIONS[name].run(case)
    return (output, measured) if statistics else output


def check_shapes(case: Case) -> None:
    """Raise ValueError if shapes do not fit together. The message names these shapes."""
    query, key, value, mask = case.query, case.key, case.value, case.mask
    if case.compatibility.equal_widths and query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same width for a dot product, got query {tuple(query.shape)} "
            f"and key {tuple(key.shape)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"each key needs one value, got key {tuple(key.shape)} and value {tuple(value.shape)}")
    lead = query.shape[:-2]
    if key.shape[:-2] != value.shape[:-2] or key.ndim != query.ndim or key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            f"leading dimensions must be equal, got query {tuple(query.shape)}, key {tuple(key.shape)}, "
            f"value {tuple(value.shape)}"
        )
    if mask is not None and mask.n_leading not in (0, len(lead)):
        raise ValueError(
            f"the mask has {mask.n_leading} leading dimensions and query {tuple(query.shape)} has {len(lead)}: for "
            f"tensors of shape (B, H, T, d), `key_padding` needs lengths of shape (B, 1), and `packed_documents` needs "
            f"documents of shape (B, 1, S)"
        )
    if case.sink is not None and case.sink.shape != lead[-1:]:
        raise ValueError(
            f"the sink needs one logit for each query head, got sink {tuple(case.sink.shape)} and query "
            f"{tuple(query.shape)}"
        )
    if lead and (key.shape[-3] == 0 or lead[-1] % key.shape[-3]):
        raise ValueError(
            f"key/value heads must divide the query heads, got query {tuple(query.shape)} and key {tuple(key.shape)}"
        )


def choose(implementation: str, case: Case) -> tuple[str, str]:
    """The name of the implementation that will run, and the reason for this choice.

    implementation: a name in IMPLEMENTATIONS, or "auto" for the fastest that can serve the case.
    Raises ValueError for an unknown name, and for a named implementation that cannot serve the case.
    """
    if implementation != "auto":
        reason = refusal(implementation, case)
        if reason is not None:
            raise ValueError(f"implementation={implementation!r} cannot be used here: {reason}")
        return implementation, "chosen by name"
    if type(case.compatibility) is Additive:
        return "chunked", "additive attention is not a dot product; its hidden values are computed in chunks"
    if not case.compatibility.lowers:
        name = type(case.compatibility).__name__
        return "reference", f"{name} has no method `lower` that rewrites it as a plain dot product"
    device = case.query.device.type
    if case.statistics:
        if device == "cuda" and triton.refusal(case) is None:
            return "triton", "our kernel computes the statistics in the same pass"
        return "reference", "only the reference implementation computes statistics for this case"
    # In fp32 our kernel is for compiled training, below; then most steps on a CPU need not ask it.
    if device == "cpu" and case.product_dtype == torch.bfloat16 and native.refusal(case) is None:
        return "native", "our kernel for CPUs with bf16 instructions"
    if (reason := sdpa.refusal(case)) is not None:
        if device == "cuda" and triton.refusal(case) is None:
            return "triton", f"our kernel; {reason}"
        return "reference", reason
    compiled = torch.compiler.is_compiling() if case.compiled is None else case.compiled
    if compiled and device == "cpu" and case.query.requires_grad:
        if native.is_measured_in_fp32() and native.refusal(case) is None:
            return "native", "our kernel for CPUs in fp32, the fastest for compiled training with AVX2"
        if case.key.shape[-2] <= WRITTEN_OUT_KEYS:
            return "reference", f"the fastest for compiled training on a CPU with at most {WRITTEN_OUT_KEYS} keys"
    return "sdpa", "torch's fused kernels support every compatibility function that can be written as a dot product"


def refusal(implementation: str, case: Case) -> str | None:
    """The reason why the named implementation cannot serve the case, or None. Raises ValueError for an unknown name."""
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"implementation={implementation!r} is unknown; allowed: {allowed}")
    if implementation not in ("reference", "chunked") and not case.compatibility.lowers:
        name = type(case.compatibility).__name__
        return f"every fused kernel needs a plain dot product, and {name} has no method `lower` that rewrites it as one"
    if case.statistics and implementation not in MEASURES_HEADS:
        return "it does not return statistics; use triton or reference"
    return IMPLEMENTATIONS[implementation].refusal(case)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    start: int | Tensor | None = None,
    modifiers: ScoreModifiers | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The attention weights (..., T, S): the weight of each value in each query's output.

    The reference implementation computes them, in fp32 or higher. It has the same arguments and errors as `attend`.

    >>> import torch
    >>> from andrea.attention import causal
    >>> attention_weights(torch.zeros(3, 4), torch.zeros(3, 4), mask=causal())
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    case = Case(query, key, key, compatibility, mask, start, modifiers=modifiers, sink=sink)
    check_shapes(case)
    how = {"modifiers": modifiers, "sink": sink}
    return attend_reference(query, key, key, compatibility, mask, case.first_position, **how).weights
