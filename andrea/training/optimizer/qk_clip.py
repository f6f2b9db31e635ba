"""QK-clip: scale down the queries and keys of a head whose attention logits exceed a threshold (Kimi K2, arXiv 2507.20534,
section 2.1, algorithm 1). L layers, H query heads, G key/value heads, D = d_head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from andrea.training.parallel.strategy import Parallel


@torch.no_grad()
def clip_logits(parallel: Parallel, largest_logit: Tensor, threshold: float, finite: Tensor) -> Tensor:
    """Multiply W_Q and W_K of each head by sqrt(threshold / largest logit), if this factor is below 1.

    largest_logit (L, H): the largest logit of each head in the last step. Query heads that share a key head have one
    factor, from the largest of their logits.
    Returns the number of scaled heads, 0-dim. If the 0-dim flag `finite` is false, nothing changes; the host does not
    wait for its value.
    """
    n_clipped = torch.zeros((), device=largest_logit.device)
    for layer, (block, layer_logits) in enumerate(zip(parallel.model.blocks, largest_logit, strict=True)):
        attention = block.attention
        n_group = attention.key.out_features // attention.d_head
        heads_in_group = len(layer_logits) // n_group
        group_logits = layer_logits.unflatten(0, (n_group, -1)).amax(1)  # (G,)
        factor = torch.where(finite & (group_logits > threshold), threshold / group_logits, 1.0)
        n_clipped += (factor < 1).sum() * heads_in_group
        for projection, heads in (("query", heads_in_group), ("key", 1)):
            name = f"blocks.{layer}.attention.{projection}"
            device = parallel.local_parameters[f"{name}.weight"].device
            row_factors = factor.sqrt().to(device).repeat_interleave(heads * attention.d_head)  # (rows of the matrix,)
            parallel.local_parameters[f"{name}.weight"].mul_(row_factors[parallel.local_rows(f"{name}.weight"), None])
            if f"{name}.bias" in parallel.local_parameters:
                parallel.local_parameters[f"{name}.bias"].mul_(row_factors[parallel.local_rows(f"{name}.bias")])
    return n_clipped
