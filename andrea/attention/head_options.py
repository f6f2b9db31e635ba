"""What may happen to a head's vector z between the weighted sum of the values and W_O.

B batch, T tokens, H heads, D = d_head.
"""

from __future__ import annotations

import torch
from torch import Tensor

GATES = ("scalar", "elementwise")


def gate_of_logits(logits: Tensor, n_head: int) -> Tensor:
    """Head gates 2·sigmoid(logits): logits (B, T, H·E) -> gates (B, H, T, E) in 0 .. 2, which multiply z (B, H, T, D).

    E is 1 (scalar: one gate per head) or D (elementwise: one per channel of the head). A gate on the output of attention
    lets a head write nothing for a token, which softmax weights alone cannot say (Qiu et al. 2025, arXiv 2505.06708,
    section 2.2, position G1). The factor 2 is ours: logits of zero then leave z unchanged.

    >>> gate_of_logits(torch.zeros(1, 1, 2), n_head=2).flatten()
    tensor([1., 1.])
    """
    return 2 * torch.sigmoid(logits).unflatten(-1, (n_head, -1)).transpose(1, 2)
