"""QK-clip: a head whose logits grow past a threshold has its queries and keys scaled down (Kimi K2, arXiv 2507.20534,
section 2.1, algorithm 1). H query heads, G key/value heads, D = d_head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from andrea.training.parallel.strategy import Parallel


@torch.no_grad()
def clip_logits(parallel: Parallel, largest_logit: Tensor, threshold: float, finite: Tensor) -> Tensor:
    """Scale W_Q and W_K of each head by sqrt(threshold / largest logit) where that is below 1; how many, 0-dim.

    largest_logit (L, H) of the step just made. Heads that share a key are scaled together, by the largest of them.
    Nothing changes where the 0-dim flag `finite` is false; no host waits.
    """
    clipped = torch.zeros((), device=largest_logit.device)
    for layer, (block, largest) in enumerate(zip(parallel.model.blocks, largest_logit, strict=True)):
        attention = block.attention
        n_group = attention.key.out_features // attention.d_head
        of_group = largest.unflatten(0, (n_group, -1)).amax(1)  # (G,)
        factor = torch.where(finite & (of_group > threshold), threshold / of_group, 1.0)
        clipped += (factor < 1).sum() * (len(largest) // n_group)
        for projection, shared_by in (("query", len(largest) // n_group), ("key", 1)):
            name = f"blocks.{layer}.attention.{projection}"
            device = parallel.local_parameters[f"{name}.weight"].device
            rows = (
                factor.sqrt().to(device).repeat_interleave(shared_by * attention.d_head)
            )  # for each row of the matrix
            parallel.local_parameters[f"{name}.weight"].mul_(rows[parallel.rows(f"{name}.weight"), None])
            if f"{name}.bias" in parallel.local_parameters:
                parallel.local_parameters[f"{name}.bias"].mul_(rows[parallel.rows(f"{name}.bias")])
    return clipped
