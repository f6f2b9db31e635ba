"""Measure which implementation is fastest for the shapes of a case on the GPU at hand."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch

from andrea.attention.attend import attend, refusal
from andrea.attention.compatibility import DotProduct
from andrea.attention.implementations.case import Case
from andrea.attention.implementations.sdpa import SDPA_BACKENDS
from andrea.attention.implementations.triton import kernel_errors

CANDIDATES = (*SDPA_BACKENDS, "flex", "triton")
WARM_UPS, REPEATS = 3, 10


def measure(case: Case, n_batch: int) -> dict[str, float]:
    """Milliseconds of forward and backward pass together, by implementation, fastest first.

    The tensors are random. They have n_batch sequences, and otherwise the shapes, type, device and mask of the case.
    The compatibility function is the plain dot product, because every other function is lowered to it. Implementations
    that cannot serve the case are left out.
    """
    shapes = [(n_batch, *each.shape[1:]) for each in (case.query, case.key, case.value)]
    shapes.append((*shapes[0][:-1], case.value.shape[-1]))
    *leaves, upstream = (torch.randn(shape, dtype=case.query.dtype, device=case.query.device) for shape in shapes)
    sink = None if case.sink is None else torch.zeros_like(case.sink).requires_grad_()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    plain = dataclasses.replace(case, compatibility=DotProduct(), statistics=False)
    milliseconds = {}
    for name in CANDIDATES:
        if refusal(name, plain) is not None:
            continue
        # Training with triton computes statistics at every step, so their cost is part of its time.
        how = {"compatibility": plain.compatibility, "mask": case.mask, "statistics": name == "triton"}
        how |= {"modifiers": case.modifiers, "sink": sink}

        def run(name: str = name, how: dict = how) -> None:
            output = attend(*leaves, **how, implementation=name)
            output = output[0] if isinstance(output, tuple) else output
            torch.autograd.grad(output, leaves if sink is None else [*leaves, sink], upstream)

        try:
            milliseconds[name] = median_milliseconds(run)
        except (RuntimeError, *kernel_errors()):  # no kernel for this type, width or GPU
            continue
    return dict(sorted(milliseconds.items(), key=lambda item: item[1]))


def median_milliseconds(run: Callable[[], None]) -> float:
    """Median time of one call on the CUDA device."""
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
