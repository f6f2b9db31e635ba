"""torch.compile: its settings, whether it pays for a run, and the one function through which the package calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

from andrea.runtime.device import Choice

# A run shorter than this takes less time than its compiling; in FLOPs of the whole run, by device.
SHORTEST_RUN_FLOPS = {"cpu": 1e13, "cuda": 1e16}
WHOLE_GRAPH_FLOPS = 1e14  # on a CPU; below, compiling block by block pays sooner than compiling the whole model
RELIABLE_GCC = 11  # from this version on g++ knows every vector instruction that torch.compile uses


def choose_compile(requested: str, device: torch.device, total_flops: float) -> Choice:
    """`auto` is `on`, `blocks` or `off`, by whether a run of `total_flops` FLOPs is long enough to earn back the compiling.

    On a CPU compiling takes about a quarter of a minute block by block, and up to a minute for the whole model in one
    graph, which then trains a few percent faster (bench/README.md).
    """
    if requested != "auto":
        return Choice(requested, "as set")
    if device.type == "mps":
        return Choice("off", "torch.compile is not reliable on mps")
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++") or os.environ.get("CXX")):
        return Choice("off", "no C++ compiler found; install g++ to train faster")
    if total_flops < SHORTEST_RUN_FLOPS[device.type]:
        return Choice("off", "the run is too short to earn back the compile time")
    if device.type == "cpu" and total_flops < WHOLE_GRAPH_FLOPS:
        return Choice("blocks", "block by block, for a short run: compiling the whole model takes twice as long")
    return Choice("on", "faster after about a minute of compiling")


def configure_compiler(device: torch.device) -> None:
    """Set what makes the first step start sooner and that torch.compile leaves off by default.

    Its cache skips graphs that contain a user's autograd.Function unless allowed: ours are pure functions of their
    arguments. And on a CPU it spends about ten seconds on test programs for the vector instructions; those that the
    processor lists are enough, because every recent g++ knows all of them.
    """
    from torch._functorch import config as autograd_settings
    from torch._inductor import config as compiler_settings

    if hasattr(autograd_settings, "autograd_cache_allow_custom_autograd_functions"):
        autograd_settings.autograd_cache_allow_custom_autograd_functions = True
    if device.type == "cpu" and sys.platform == "linux" and gcc_version() >= RELIABLE_GCC:
        compiler_settings.cpp.vec_isa_ok = True


def gcc_version() -> int:
    """The major version of g++, which torch.compile calls on a CPU; 0 without g++, or where CXX names another compiler."""
    if os.environ.get("CXX") or not shutil.which("g++"):
        return 0
    answer = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    major = answer.partition(".")[0].strip()
    return int(major) if major.isdigit() else 0


def compile_graph(function: Callable, fullgraph: bool = True) -> Callable:
    """`function`, compiled at its first call for the shapes of that call, and again for every other combination of shapes.

    fullgraph: raise one of `compile_errors` at code that cannot be compiled; otherwise that code runs uncompiled.
    """
    return torch.compile(function, dynamic=False, fullgraph=fullgraph)


def compile_errors() -> tuple[type[Exception], ...]:
    """What a compiled function raises where torch.compile fails on this machine, for an `except` clause."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InductorError

    return TorchDynamoException, FailOnRecompileLimitHit, InductorError, CppCompileError
