"""What may happen to a head's vector z between the weighted sum of the values and W_O: first exclusion, then a gate.

B batch, T tokens, H heads, G key/value heads (G divides H), D = d_head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from andrea.attention.shapes import shared_by_group

GATES = ("scalar", "elementwise")
EXCLUSIVE = ("fixed", "learned")
# The share with which learned exclusion begins. andrea-nano at 280 steps ends at 1.362 bits per byte from one half, at 1.372
# from 0; with all of it fixed at 1.376, without exclusion at 1.405 (one seed each).
FIRST_SHARE = 0.5
OWN_VALUE_EPSILON = 1e-6  # added to v·v, so that a value of zeros excludes nothing


def without_own_value(retrieved: Tensor, own_value: Tensor, share: Tensor | None = None) -> Tensor:
    """Exclusive self-attention: z_t - a (z_t·v_t) / (v_t·v_t + ε) v_t (Zhai 2026, arXiv 2603.09078).

    The head's vector z_t loses a share a of its component along v_t, the token's own value. What the token says about
    itself then goes through the residual stream and the MLP, and the head is left to what other tokens say.
    retrieved (B, H, T, D): z. own_value (B, G, T, D): v. share (H,): a; all of it if None. Computed in fp32 or higher.

    >>> without_own_value(torch.tensor([[[[3.0, 5.0]]]]), torch.tensor([[[[2.0, 0.0]]]])).flatten().round(decimals=3)
    tensor([0., 5.])
    """
    dtype = torch.promote_types(retrieved.dtype, torch.float32)
    z, v = retrieved.to(dtype), shared_by_group(own_value, retrieved).to(dtype)
    along = (z * v).sum(-1, keepdim=True) / (v.square().sum(-1, keepdim=True) + OWN_VALUE_EPSILON)
    if share is not None:
        along = along * share.to(dtype)[:, None, None]
    return (z - along * v).to(retrieved.dtype)


def gate_of_logits(logits: Tensor, n_head: int) -> Tensor:
    """Head gates 2·sigmoid(logits): logits (B, T, H·E) -> gates (B, H, T, E) in 0 .. 2, which multiply z (B, H, T, D).

    E is 1 (scalar: one gate per head) or D (elementwise: one per channel of the head). A gate on the output of attention
    lets a head write nothing for a token, which softmax weights alone cannot say (Qiu et al. 2025, arXiv 2505.06708,
    section 2.2, position G1). The factor 2 is ours: logits of zero then leave z unchanged.

    >>> gate_of_logits(torch.zeros(1, 1, 2), n_head=2).flatten()
    tensor([1., 1.])
    """
    return 2 * torch.sigmoid(logits).unflatten(-1, (n_head, -1)).transpose(1, 2)
