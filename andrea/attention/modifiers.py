"""Score modifiers: functions of a score and of where it stands. They act before the mask and the softmax.

T queries, S keys, H query heads, any leading dimensions in front. A compatibility function sees a query and a key, but
not their positions. A modifier sees the score, the position i of the query, the position j of the key, and the head h:

| modifier | score | source |
|---|---|---|
| soft cap | s' = c·tanh(s / c) | Gemma 2, arXiv 2408.00118, section 2 |
| ALiBi | s' = s - slope_h·abs(i - j) | Press et al. 2022, arXiv 2108.12409, section 3 |

With both, the cap comes first, so that it does not limit the distances.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreModifiers:
    """The modifiers of a layer. softcap: c; None for no cap. alibi: whether scores fall with the distance.

    >>> import torch
    >>> scores, position = torch.zeros(2, 3, 3), torch.arange(3)  # 2 heads, 3 queries, 3 keys
    >>> ScoreModifiers(alibi=True).modified(scores, position[:, None], position)[1]
    tensor([[ 0.0000, -0.0039, -0.0078],
            [-0.0039,  0.0000, -0.0039],
            [-0.0078, -0.0039,  0.0000]])
    """

    softcap: float | None = None
    alibi: bool = False

    def modified(self, scores: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        """scores (..., H, T, S), without H for a single head, query_position (..., T, 1), key_position (S,) -> (..., H, T, S)."""
        if self.softcap is not None:
            scores = capped(scores, self.softcap)
        if self.alibi:
            n_head = scores.shape[-3] if scores.ndim > 2 else 1
            scores = scores + distance_bias(n_head, query_position, key_position, scores.dtype)
        return scores


def capped(scores: Tensor, cap: float | Tensor) -> Tensor:
    """c·tanh(scores / c): about the score itself where it is small, and never beyond -c .. c."""
    return cap * torch.tanh(scores / cap)


def distance_bias(n_head: int, query_position: Tensor, key_position: Tensor, dtype: torch.dtype) -> Tensor:
    """-slope_h·|i - j| for query_position (..., T, 1) and key_position (S,): (..., H, T, S), without H for one head."""
    distance = (query_position - key_position).abs().to(dtype)
    slopes = alibi_slopes(n_head, distance.device, dtype)
    return -slopes[0] * distance if n_head == 1 else -slopes[:, None, None] * distance


def alibi_slopes(n_head: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """ALiBi's slope of each head, (H,): 2^(-8h/H) for h = 1 .. H if H is a power of two.

    Otherwise, as in the paper's code: the slopes of P heads, where P is the largest power of two below H, and then every
    second slope of 2 P heads, beginning with the first. The numbers are computed on the device, without a copy from the
    host, so that a CUDA graph can hold them.

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    power = 1 << (n_head.bit_length() - 1)  # P
    head = torch.arange(1, n_head + 1, device=device, dtype=dtype)
    return torch.exp2(-8 * torch.where(head <= power, head / power, (2 * (head - power) - 1) / (2 * power)))
