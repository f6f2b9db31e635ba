"""Measure which implementation is fastest for the shapes of a case on the GPU at hand."""

import dataclasses
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from andrea.attention.attend import attend, refusal
from andrea.attention.compatibility import Case, DotProduct
from andrea.attention.implementations.sdpa import SDPA_BACKENDS
from andrea.attention.implementations.triton import kernel_errors
from andrea.attention.statistics import HeadStatistics, head_statistics
from andrea.runtime.compiling import compile_errors, compile_graph

CANDIDATES = (*SDPA_BACKENDS, "flex", "triton")
WARM_UPS, ROUNDS, QUEUED = 3, 5, 10


def measure(case: Case, n_batch: int, compiled: bool = False) -> dict[str, float]:
    """Milliseconds of forward and backward pass together, by implementation, fastest first.

    The tensors are random. They have n_batch sequences, and otherwise the shapes, type, device and mask of the case. Their
    memory is laid out (B, T, H, D), as a layer's products leave them.
    The compatibility function is the plain dot product, because every other function is lowered to it. Implementations
    that cannot serve the case are left out.

    compiled: whether training compiles its steps. Training with triton computes the statistics of each head at every
    step, so their cost is part of its time. In a compiled step torch.compile fuses the reduction from rows to heads,
    which takes several times as long in eager code. Therefore this reduction is compiled here too.
    """
    shapes = [(n_batch, *each.shape[1:]) for each in (case.query, case.key, case.value)]
    shapes.append((*shapes[0][:-1], case.value.shape[-1]))
    of_tokens = ((n, t, h, d) for n, h, t, d in shapes)
    drawn = (torch.randn(shape, dtype=case.query.dtype, device=case.query.device) for shape in of_tokens)
    *leaves, upstream = (each.transpose(1, 2) for each in drawn)
    sink = None if case.sink is None else torch.zeros_like(case.sink).requires_grad_()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    plain = dataclasses.replace(case, compatibility=DotProduct(), statistics=False)
    milliseconds = {}
    for name in CANDIDATES:
        if refusal(name, plain) is not None:
            continue
        how = {"compatibility": plain.compatibility, "mask": case.mask, "statistics": name == "triton"}
        how |= {"modifiers": case.modifiers, "sink": sink, "implementation": name}
        forward = attend_and_reduce if name == "triton" else attend
        if name == "triton" and compiled:
            forward = compile_graph(attend_and_reduce)

        def run(forward: Callable = forward, how: dict = how) -> None:
            output = forward(*leaves, **how)
            output = output[0] if isinstance(output, tuple) else output
            torch.autograd.grad(output, leaves if sink is None else [*leaves, sink], upstream)

        try:
            with warnings.catch_warnings():  # torch warns of each kernel that cannot serve, as in deterministic mode
                warnings.simplefilter("ignore")
                milliseconds[name] = median_milliseconds(run)
        except (RuntimeError, *kernel_errors(), *compile_errors()):  # no kernel for this type, width or GPU
            continue
    return dict(sorted(milliseconds.items(), key=lambda item: item[1]))


def attend_and_reduce(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, HeadStatistics]:
    """What a layer of a training step computes with our kernel: the output, and the statistics of its heads."""
    output, rows = attend(query, key, value, **how)
    n_key = key.shape[-2]
    return output, head_statistics(rows, how["mask"], n_key - query.shape[-2], n_key)


def median_milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call on the CUDA device.

    The host queues several calls between two events, so that the device does not wait for the launch of the first one
    of every pair. A call alone would be timed together with its launch, which takes a third of a short call's time.
    """
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(QUEUED):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / QUEUED)
    return statistics.median(times)
