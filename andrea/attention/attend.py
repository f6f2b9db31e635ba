"""The public function: check the shapes, choose an implementation, run it.

T queries, S keys, widths d_q (query), d_k (key) and d_v (value), H query heads, any leading dimensions in front.

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

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from andrea.attention.compatibility import Compatibility, ScaledDotProduct
from andrea.attention.implementations.case import Case
from andrea.attention.implementations.choose import IMPLEMENTATIONS, choose
from andrea.attention.implementations.reference import attend_reference
from andrea.attention.mask import Mask
from andrea.attention.statistics import AttentionStatistics

SCALED_DOT_PRODUCT = ScaledDotProduct()


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

    The leading dimensions are equal, except that G key/value heads, which divide H, may each be shared by H / G query
    heads (Ainslie et al. 2023, arXiv 2305.13245).
    start: position of the first query among the keys; S - T if None. A 0-d integer tensor lets one compiled graph serve
    every position of a preallocated cache; a tensor (B, 1, 1) gives each sequence its own.
    implementation: a named implementation runs, or a ValueError gives the reason why it cannot.
      auto       the fastest that can serve the case
      reference  the textbook, written out: any compatibility function, any autograd
      chunked    the additive function without its (T, S, n) tensor
      native     our fused kernel for CPUs: causal, in bf16
      sdpa       torch's fused kernels; sdpa_flash, sdpa_efficient, sdpa_cudnn: that kernel (CUDA)
      flex       torch's FlexAttention (CUDA)
      triton     our fused kernel (CUDA)
    statistics: return (output, AttentionStatistics) instead. `triton` measures log-sum-exp, largest logit and entropy in
    the same pass, and derives the weights of the first and the previous token from them. The readable paths measure the
    written-out scores. The other implementations return no statistics.

    >>> import torch
    >>> from andrea.attention import causal
    >>> query, key, value = torch.randn(3, 2, 8, 7, 16)  # 2 sequences, 8 heads, 7 tokens, head width 16
    >>> output, measured = attend(query, key, value, mask=causal(), statistics=True)
    >>> output.shape, measured.entropy_nats.shape
    (torch.Size([2, 8, 7, 16]), torch.Size([2, 8, 7]))
    """
    case = Case(query, key, value, compatibility, mask, start, statistics)
    case.check_shapes()
    name, _ = choose(implementation, case)
    output, measured = IMPLEMENTATIONS[name].run(case)
    return (output, measured) if statistics else output


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    compatibility: Compatibility = SCALED_DOT_PRODUCT,
    mask: Mask | None = None,
    start: int | Tensor | None = None,
) -> Tensor:
    """weights (..., T, S) in fp32 or higher: the share of each value in a query's output. Always by the readable path.

    >>> import torch
    >>> from andrea.attention import causal
    >>> attention_weights(torch.zeros(3, 4), torch.zeros(3, 4), mask=causal())
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    case = Case(query, key, key, compatibility, mask, start)
    case.check_shapes()
    return attend_reference(query, key, key, compatibility, mask, case.first_position).weights
