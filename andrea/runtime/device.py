"""What to run on and how: device, threads, precision, torch.compile. Each choice comes with its reason, in words."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass

import torch

from andrea.config import UserError

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets; MFU is shown only for a card that is listed.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "A10G": 70e12,
}

MALLOC_TRIM_THRESHOLD, MALLOC_TOP_PAD, MALLOC_MMAP_MAX = -1, -2, -4  # <malloc.h>'s numbers


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why, for the line shown at the start."""

    value: str
    why: str


def choose_device(asked: str) -> torch.device:
    """`auto` is the first of cuda, mps, cpu that is there. Raises UserError for a device that is not."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind, _, index = asked.partition(":")
    if kind == "auto":
        return torch.device(next(name for name, is_there in there.items() if is_there))
    if not there[kind] or (kind == "cuda" and index and int(index) >= torch.cuda.device_count()):
        raise UserError(f"device={asked} is not on this machine; there: {', '.join(k for k, v in there.items() if v)}")
    if index and kind == "cuda":
        torch.cuda.set_device(int(index))
    return torch.device(asked)


def choose_threads(asked: int | str) -> int:
    """Set and return torch's CPU threads; auto is torch's own choice, one per physical core it may use."""
    if asked != "auto":
        torch.set_num_threads(int(asked))
    return torch.get_num_threads()


def keep_freed_memory() -> None:
    """Have the C library keep the memory of tensors that are freed, for the next ones; glibc only, for this process.

    It hands large blocks back to the system otherwise, and a CPU's training step then takes them anew, page by page: at
    andrea-120m a seventh of the step (bench/README.md). The peak stays, and is up to a twentieth higher.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        for option, value in ((MALLOC_MMAP_MAX, 0), (MALLOC_TRIM_THRESHOLD, 2**31 - 1), (MALLOC_TOP_PAD, 2**26)):
            set_option(option, value)


def choose_precision(asked: str, device: torch.device) -> Choice:
    """bf16 where the device multiplies in it, fp16 with a loss scale on older cards, else fp32."""
    if asked == "fp16" and device.type != "cuda":
        raise UserError(f"precision=fp16 needs a CUDA card, got device={device.type}; use precision=bf16 or fp32")
    if asked != "auto":
        return Choice(asked, "as asked")
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return Choice("bf16", "the card multiplies in bf16")
        return Choice("fp16", "the card is older than bf16; the loss is scaled")
    if device.type == "cpu" and cpu_multiplies_bf16():
        return Choice("bf16", "this CPU multiplies in bf16")
    return Choice("fp32", "this device gains nothing from bf16")


def weight_dtype(precision: str) -> torch.dtype:
    """The type weights are converted to where nothing is trained."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def cpu_multiplies_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def choose_compile(asked: str, device: torch.device, total_flops: float) -> Choice:
    """torch.compile pays when the run is long enough to earn back its time: a quarter of a minute block by block on a CPU,
    half a minute to a minute for all in one graph, which is a few percent faster (bench/README.md).
    """
    if asked != "auto":
        return Choice(asked, "as asked")
    if device.type == "mps":
        return Choice("off", "torch.compile is not reliable on mps")
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++") or os.environ.get("CXX")):
        return Choice("off", "no C++ compiler found; install g++ to train faster")
    if total_flops < (1e13 if device.type == "cpu" else 1e16):
        return Choice("off", "the run is too short to earn back the compile time")
    if device.type == "cpu" and total_flops < 1e14:
        return Choice("blocks", "block by block, for a short run: compiling all in one takes twice as long")
    return Choice("on", "faster after about a minute of compiling")


def shorten_compiling(device: torch.device) -> None:
    """Settle what torch.compile leaves aside by default, and what costs a start seconds.

    What it has made of an autograd.Function is kept for the next start only where that is allowed: ours depend on their
    arguments alone. And it tries out a CPU's vector instructions with programs of its own, for ten seconds: they are
    known from the processor, and every compiler since GCC 11 knows all of them.
    """
    from torch._functorch import config as autograd_settings
    from torch._inductor import config as compiler_settings

    if hasattr(autograd_settings, "autograd_cache_allow_custom_autograd_functions"):
        autograd_settings.autograd_cache_allow_custom_autograd_functions = True
    if device.type == "cpu" and sys.platform == "linux" and gcc_version() >= 11:
        compiler_settings.cpp.vec_isa_ok = True


def gcc_version() -> int:
    """The major version of g++, which is what torch.compile calls; 0 where there is none, or another compiler."""
    if os.environ.get("CXX") or not shutil.which("g++"):
        return 0
    told = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    major = told.partition(".")[0].strip()
    return int(major) if major.isdigit() else 0


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Matrix products in the chosen precision; weights stay fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, weight_dtype(precision))


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, or None where it is not known: then no MFU is shown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: by tensors on the card, or by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
