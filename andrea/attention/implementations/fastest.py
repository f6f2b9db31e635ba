"""Which implementation is fastest on this card for this shape: measured, because the answer changes with both.

B batch, H query heads, G key/value heads, T tokens, D = d_head.
"""

from __future__ import annotations

import statistics

import torch

from andrea.attention.attend import attend, refusal
from andrea.attention.compatibility import DotProduct
from andrea.attention.implementations.sdpa import SDPA_BACKENDS
from andrea.attention.implementations.triton import kernel_errors
from andrea.attention.mask import Mask

CANDIDATES = (*SDPA_BACKENDS, "flex", "triton")
WARM_UPS, REPEATS = 3, 10


def measure(
    n_batch: int,
    n_head: int,
    n_kv_head: int,
    n_token: int,
    d_head: int,
    dtype: torch.dtype,
    device: torch.device,
    mask: Mask,
) -> dict[str, float]:
    """Milliseconds of forward and backward together by implementation, fastest first; those that cannot are left out."""
    shapes = [(n_batch, heads, n_token, d_head) for heads in (n_head, n_kv_head, n_kv_head, n_head)]
    query, key, value, upstream = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    milliseconds = {}
    for name in CANDIDATES:
        if refusal(name, query, key, value, DotProduct(), mask, False) is not None:
            continue

        def run(name: str = name) -> None:
            # Training by our kernel measures its heads at every step: what that costs belongs to its time.
            how = {"compatibility": DotProduct(), "mask": mask, "implementation": name, "statistics": name == "triton"}
            output = attend(*leaves, **how)
            output = output[0] if isinstance(output, tuple) else output
            torch.autograd.grad(output, leaves, upstream)

        try:
            milliseconds[name] = timed(run)
        except (RuntimeError, *kernel_errors()):  # no kernel for this type, width or card
            continue
    return dict(sorted(milliseconds.items(), key=lambda item: item[1]))


def timed(run) -> float:
    """Median milliseconds on the CUDA device."""
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
