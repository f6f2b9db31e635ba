"""The public function: check, choose an implementation, attend.

T queries, S keys, widths d_q (query), d_k (key) and d_v (value), H query heads, any leading dimensions in front.

Retrieval (specification, section 1): keys are unit vectors, so that the query itself is the scores.

>>> import torch
>>> from andrea.attention import DotProduct, attend, attention_weights
>>> query, key = torch.tensor([[0.9, 0.1, 1e-30]]).log(), torch.eye(3)
>>> value = torch.tensor([[1000.0], [2000.0], [3000.0]])
>>> attention_weights(query, key, compatibility=DotProduct()).round(decimals=4)
tensor([[0.9000, 0.1000, 0.0000]])
>>> attend(query, key, value, compatibility=DotProduct()).round()
tensor([[1100.]])
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from andrea.attention.compatibility import Additive, Compatibility, ScaledDotProduct
from andrea.attention.implementations.chunked import additive_scores
from andrea.attention.implementations.native import attend_native, refusal_of_native
from andrea.attention.implementations.reference import attend_reference
from andrea.attention.implementations.sdpa import SDPA_BACKENDS, attend_flex, attend_sdpa
from andrea.attention.implementations.triton import attend_fused, refusal_of_triton
from andrea.attention.mask import Causal, Mask
from andrea.attention.statistics import AttentionStatistics, statistics_of_scores

SCALED_DOT_PRODUCT = ScaledDotProduct()
IMPLEMENTATIONS = ("reference", "chunked", "native", "sdpa", *SDPA_BACKENDS, "flex", "triton")
# Up to so many keys torch.compile's code for the written-out form trains faster on a CPU than torch's fused kernel does.
WRITTEN_OUT_KEYS = 512


@overload
def attend(
    query: Tensor, key: Tensor, value: Tensor, *, compatibility: Compatibility = ..., mask: Mask | None = ...,
    start: int | Tensor | None = ..., implementation: str = ..., statistics: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    query: Tensor, key: Tensor, value: Tensor, *, compatibility: Compatibility = ..., mask: Mask | None = ...,
    start: int | Tensor | None = ..., implementation: str = ..., statistics: Literal[True],
) -> tuple[Tensor, AttentionStatistics]: ...  # fmt: skip
def attend(
    query,
    key,
    value,
    *,
    compatibility=SCALED_DOT_PRODUCT,
    mask=None,
    start=None,
    implementation="auto",
    statistics=False,
):
    """query (..., H, T, d_q), key (..., G, S, d_k), value (..., G, S, d_v) -> output (..., H, T, d_v).

    Leading dimensions are equal, but for the last of them: G key/value heads that divide H are shared by H / G query
    heads each (Ainslie et al. 2023, arXiv 2305.13245).
    start: where the first query stands among the keys; S - T when left out. A 0-d integer tensor lets one compiled
    graph serve every position of a preallocated cache; one of shape (B, 1, 1) says it for each sequence.
    implementation: what is named runs, or a ValueError says why not.
      auto       the fastest that serves the case
      reference  the textbook, written out: any compatibility function, any autograd
      chunked    the additive function without its (T, S, n) tensor
      native     our fused kernel for CPUs: causal, in bf16
      sdpa       torch's fused kernels; sdpa_flash, sdpa_efficient, sdpa_cudnn: that one (CUDA)
      flex       torch's FlexAttention (CUDA)
      triton     our fused kernel (CUDA)
    statistics: return (output, AttentionStatistics) instead. `triton` measures log-sum-exp, largest logit and entropy in
    the same pass, and the masses of two keys a query from those; the readable paths measure the written-out scores.

    >>> from andrea.attention import causal
    >>> query, key, value = torch.randn(3, 2, 8, 7, 16)  # 2 sequences, 8 heads, 7 tokens, head width 16
    >>> output, measured = attend(query, key, value, mask=causal(), statistics=True)
    >>> output.shape, measured.entropy_nats.shape
    (torch.Size([2, 8, 7, 16]), torch.Size([2, 8, 7]))
    """
    check_shapes(query, key, value, compatibility, mask)
    name, _ = choose(implementation, query, key, value, compatibility, mask, statistics, start=start)
    start = key.shape[-2] - query.shape[-2] if start is None else start
    if name in ("reference", "chunked"):
        scores_of = None
        if name == "chunked":
            scores_of = lambda query, key: additive_scores(compatibility, query, key)  # noqa: E731
        written_out = attend_reference(query, key, value, compatibility, mask, start, scores_of)
        if statistics:
            return written_out.output, statistics_of_scores(written_out.scores, written_out.weights, start)
        return written_out.output
    query, key = compatibility.lowered(query, key)
    if name == "triton":
        output, rows = attend_fused(query, key, value, mask, start, statistics)
        return (output, rows) if statistics else output
    if name == "native":
        return attend_native(query, key, value)
    if name == "flex":
        return attend_flex(query, key, value, mask, start)
    return attend_sdpa(query, key, value, mask, start, None if name == "sdpa" else name)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    start: int | Tensor | None = None,
) -> Tensor:
    """weights (..., T, S), fp32 or higher: how much of each value a query retrieves. Always the readable path.

    >>> from andrea.attention import causal
    >>> attention_weights(torch.zeros(3, 4), torch.zeros(3, 4), mask=causal())
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    check_shapes(query, key, key, compatibility, mask)
    start = key.shape[-2] - query.shape[-2] if start is None else start
    return attend_reference(query, key, key, compatibility, mask, start).weights


def choose(
    implementation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    statistics: bool = False,
    compiled: bool | None = None,
    start: int | Tensor | None = None,
) -> tuple[str, str]:
    """The implementation that will run, and why in a few words. Raises ValueError where the named one cannot.

    compiled: whether torch.compile will have made the code; whether it is making it now, when left out.
    """
    if implementation != "auto":
        if implementation not in IMPLEMENTATIONS:
            allowed = ", ".join(("auto", *IMPLEMENTATIONS))
            raise ValueError(f"implementation={implementation!r} is unknown; allowed: {allowed}")
        reason = refusal(implementation, query, key, value, compatibility, mask, statistics, start)
        if reason is not None:
            raise ValueError(f"implementation={implementation!r} cannot serve this: {reason}")
        return implementation, "asked for by name"
    if isinstance(compatibility, Additive):
        return "chunked", "the additive function has no lowered form; its hidden values are computed in chunks"
    if not compatibility.lowers:
        return "reference", f"{type(compatibility).__name__} has no lowered form"
    if statistics:
        if query.device.type == "cuda" and refusal("triton", query, key, value, compatibility, mask, True) is None:
            return "triton", "our kernel measures in the same pass"
        return "reference", "only the readable path measures here"
    compiled = torch.compiler.is_compiling() if compiled is None else compiled
    if refusal("native", query, key, value, compatibility, mask, statistics, start) is None:
        return "native", "our kernel for CPUs that multiply in bf16"
    if compiled and query.device.type == "cpu" and query.requires_grad and key.shape[-2] <= WRITTEN_OUT_KEYS:
        return "reference", f"training compiled for a CPU, with at most {WRITTEN_OUT_KEYS} keys"
    return "sdpa", "torch's fused kernels serve every compatibility function that lowers"


def refusal(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compatibility: Compatibility,
    mask: Mask | None,
    statistics: bool,
    start: int | Tensor | None = None,
) -> str | None:
    """Why the implementation of that name cannot serve the case; None if it can."""
    if name == "reference":
        return None
    if name == "chunked":
        return None if isinstance(compatibility, Additive) else "it is made for the additive function alone"
    if not compatibility.lowers:
        return f"{type(compatibility).__name__} has no lowered form, which every fused kernel needs"
    if name == "triton":
        return refusal_of_triton(query, key, value, mask)
    if statistics:
        return "it returns no statistics; use triton or reference"
    if name == "native":
        return refusal_of_native(query, key, value, mask, start)
    if name != "sdpa" and query.device.type != "cuda":
        return f"it needs a CUDA card, got device={query.device.type}"
    square = query.shape[-2] == key.shape[-2]
    if name == "sdpa_flash" and not (mask is None or (isinstance(mask, Causal) and square)):
        return "torch's flash kernel takes no mask but the causal one over as many queries as keys"
    return None


def check_shapes(query: Tensor, key: Tensor, value: Tensor, compatibility: Compatibility, mask: Mask | None) -> None:
    """Raises ValueError with the shapes that do not fit."""
    if compatibility.equal_widths and query.shape[-1] != key.shape[-1]:
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
            f"the mask has {mask.n_leading} leading dimensions and query {tuple(query.shape)} has {len(lead)}: for tensors "
            f"(B, H, T, d) give key_padding lengths (B, 1) and packed_documents documents (B, 1, S)"
        )
    if lead and (key.shape[-3] == 0 or lead[-1] % key.shape[-3]):
        raise ValueError(
            f"key/value heads must divide the query heads, got query {tuple(query.shape)} and key {tuple(key.shape)}"
        )
