"""All use of torch.compile: its settings, the decision to compile a run, and the function that compiles."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

from andrea.runtime.code_cache import use_private_torch_cache
from andrea.runtime.device import Choice
from andrea.runtime.files import lines_of
from andrea.runtime.system import WINDOWS

# By device: a run of fewer FLOPs in total takes less time than compiling it.
SHORTEST_RUN_FLOPS = {"cpu": 1e13, "cuda": 1e16}
WHOLE_GRAPH_FLOPS = 1e14  # on a CPU: a run of fewer FLOPs ends sooner if it is compiled block by block
RELIABLE_GCC = 11  # from this version on g++ knows every vector instruction that torch.compile uses


def choose_compile(requested: str, device: torch.device, total_flops: float) -> Choice:
    """Choose `on`, `blocks` or `off` for `auto`: a run of `total_flops` FLOPs should earn back its compile time.

    On a CPU, compiling block by block takes about a quarter of a minute. Compiling the whole model as one graph takes
    up to a minute, and the model then trains a few percent faster (bench/README.md).
    """
    if requested != "auto":
        return Choice(requested, "as configured")
    if device.type == "mps":
        return Choice("off", "torch.compile is not reliable on mps")
    compilers = ["cl"] if WINDOWS else ["g++", "clang++"]  # that torch.compile calls
    if device.type == "cpu" and not (any(map(shutil.which, compilers)) or os.environ.get("CXX")):
        wanted = "Visual Studio's C++ tools, and start from their command prompt," if WINDOWS else "g++"
        return Choice("off", f"no C++ compiler found; install {wanted} to train faster")
    if total_flops < SHORTEST_RUN_FLOPS[device.type]:
        return Choice("off", "the run is too short to earn back the compile time")
    if device.type == "cpu" and total_flops < WHOLE_GRAPH_FLOPS:
        return Choice("blocks", "block by block, for a short run: compiling the whole model takes twice as long")
    return Choice("on", "faster after about a minute of compiling")


def configure_compiler(device: torch.device) -> None:
    """Turn on two settings of torch.compile that make the first step start sooner, and our products in fp32.

    By default its cache skips graphs with a custom autograd.Function. Ours may be cached, because they are pure
    functions of their arguments. On a CPU, torch.compile spends about ten seconds on programs that test the vector
    instructions. These tests are skipped, because every recent g++ knows all the instructions that a processor lists.
    """
    if device.type != "cuda":  # torch builds its CPU code by a module that warns of an unused CUDA compiler
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch._functorch import config as autograd_settings
    from torch._inductor import config as compiler_settings

    from andrea.runtime.product import OurProducts, is_faster_than_torch

    if hasattr(autograd_settings, "autograd_cache_allow_custom_autograd_functions"):  # private, and may go
        autograd_settings.autograd_cache_allow_custom_autograd_functions = True
    if device.type == "cpu" and sys.platform == "linux" and gcc_version() >= RELIABLE_GCC:
        compiler_settings.cpp.vec_isa_ok = True
    if device.type == "cpu" and is_faster_than_torch():
        compiler_settings.post_grad_custom_pre_pass = OurProducts()


def gcc_version() -> int:
    """The major version of g++, which torch.compile calls on a CPU; 0 without g++, or if CXX names another compiler."""
    if os.environ.get("CXX") or not shutil.which("g++"):
        return 0
    answer = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    major = answer.partition(".")[0].strip()
    return int(major) if major.isdigit() else 0


def compile_graph(function: Callable, fullgraph: bool = True) -> Callable:
    """Compile `function` for each new combination of shapes. fullgraph: raise a compile error rather than run eagerly."""
    use_private_torch_cache()
    return torch.compile(function, dynamic=False, fullgraph=fullgraph)


def compile_errors() -> tuple[type[Exception], ...]:
    """The exceptions that a compiled function raises if torch.compile fails on this machine, for an `except` clause."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InductorError

    return TorchDynamoException, FailOnRecompileLimitHit, InductorError, CppCompileError


def compile_failure(error: BaseException) -> str:
    """One line that says why compiling failed: the first line of `error`, and the last error of the C++ compiler."""
    lines = lines_of(str(error).strip()) or [type(error).__name__]
    of_compiler = [line.rpartition("error: ")[2].strip() for line in lines[1:] if "error: " in line]
    return ": ".join([lines[0], *of_compiler[-1:]])
