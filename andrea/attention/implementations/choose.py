"""Which implementation runs: the table of all of them, and the choice that implementation="auto" makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from andrea.attention.compatibility import Additive
from andrea.attention.implementations import chunked, flex, native, reference, sdpa, triton
from andrea.attention.implementations.case import Case, Result

# Training compiled for a CPU is faster on the written-out form than on torch's fused kernel up to this many keys.
WRITTEN_OUT_KEYS = 512


class Implementation(NamedTuple):
    refusal: Callable[[Case], str | None]  # why it cannot serve the case, or None
    run: Callable[[Case], Result]


IMPLEMENTATIONS = {
    "reference": Implementation(reference.refusal, reference.run),
    "chunked": Implementation(chunked.refusal, chunked.run),
    "native": Implementation(native.refusal, native.run),
    "sdpa": Implementation(sdpa.refusal, sdpa.run),
    **{
        name: Implementation(functools.partial(sdpa.refusal, backend=name), functools.partial(sdpa.run, backend=name))
        for name in sdpa.SDPA_BACKENDS
    },
    "flex": Implementation(flex.refusal, flex.run),
    "triton": Implementation(triton.refusal, triton.run),
}
MEASURING = ("reference", "chunked", "triton")  # the implementations that return statistics


def choose(implementation: str, case: Case) -> tuple[str, str]:
    """The name of the implementation that will run, and the reason in a few words.

    implementation: a name in IMPLEMENTATIONS, or "auto" for the fastest that can serve the case.
    Raises ValueError for an unknown name, and for a named implementation that cannot serve the case.
    """
    if implementation != "auto":
        reason = refusal(implementation, case)
        if reason is not None:
            raise ValueError(f"implementation={implementation!r} cannot serve this: {reason}")
        return implementation, "asked for by name"
    if type(case.compatibility) is Additive:
        return "chunked", "the additive function has no lowered form; its hidden values are computed in chunks"
    if not case.compatibility.lowers:
        return "reference", f"{type(case.compatibility).__name__} has no lowered form"
    device = case.query.device.type
    if case.statistics:
        if device == "cuda" and triton.refusal(case) is None:
            return "triton", "our kernel measures in the same pass"
        return "reference", "only the readable path measures here"
    if native.refusal(case) is None:
        return "native", "our kernel for CPUs that multiply in bf16"
    compiled = torch.compiler.is_compiling() if case.compiled is None else case.compiled
    if compiled and device == "cpu" and case.query.requires_grad and case.key.shape[-2] <= WRITTEN_OUT_KEYS:
        return "reference", f"training compiled for a CPU, with at most {WRITTEN_OUT_KEYS} keys"
    return "sdpa", "torch's fused kernels serve every compatibility function that lowers"


def refusal(implementation: str, case: Case) -> str | None:
    """Why the implementation of that name cannot serve the case; None if it can. Raises ValueError for an unknown name."""
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"implementation={implementation!r} is unknown; allowed: {allowed}")
    return IMPLEMENTATIONS[implementation].refusal(case)
