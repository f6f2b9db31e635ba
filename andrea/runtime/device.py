"""The device of a run, its CPU threads, the precision of matrix products, and memory."""

import contextlib
import ctypes
import functools
import math
import mmap
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.runtime.system import private_memory

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets. MFU (model FLOPs utilisation) is shown for these GPUs only.
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

MALLOC_TRIM_THRESHOLD, MALLOC_TOP_PAD, MALLOC_MMAP_MAX = -1, -2, -4  # mallopt's option numbers, from <malloc.h>
AMPERE = 80  # compute capability times ten of the first NVIDIA GPUs with bf16 instructions, and the first for Triton
# The type that a precision stands for. Weights are converted to it for inference.
WEIGHT_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Choice:
    """A setting's value and the reason for it, in the words of the line that a run prints at its start."""

    value: Any
    why: str = ""


def set_determinism(wanted: bool) -> None:
    """Whether torch refuses, for the whole process, what may give other bits the next time."""
    torch.use_deterministic_algorithms(wanted)
    # Otherwise torch fills new tensors with NaN in deterministic runs, which takes 1.5 % of a step of andrea-nano.
    torch.utils.deterministic.fill_uninitialized_memory = False


@contextlib.contextmanager
def determinism_restored() -> Iterator[None]:
    """At the end, torch is as deterministic as it was before."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def choose_device(requested: str) -> torch.device:
    """The device `requested`; `auto` is the first of cuda, mps and cpu on this machine. Raises UserError for one it lacks."""
    available = [kind for kind in ("cuda", "mps", "cpu") if is_available(kind)]
    kind, _, index = requested.partition(":")
    if kind == "auto":
        return torch.device(available[0])
    if kind not in available or (kind == "cuda" and index and int(index) >= torch.cuda.device_count()):
        refusal = f"device={requested} is not on this machine; available: {', '.join(available)}"
        raise UserError("; ".join([refusal, *unused_gpu()]))
    if index and kind == "cuda":
        torch.cuda.set_device(int(index))
    return torch.device(requested)


def is_available(kind: str) -> bool:
    """Whether torch can compute on a device of this kind here."""
    if kind == "cuda":
        return torch.cuda.is_available()
    return kind == "cpu" or torch.backends.mps.is_available()


@functools.cache
def has_fp64(device: torch.device) -> bool:
    """Whether the device holds fp64 numbers; Apple's MPS does not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def unused_gpu(root: Path = Path("/")) -> list[str]:
    """One line that says why torch cannot use this machine's NVIDIA or AMD GPU; none without such a GPU, or if it can.

    root: the folder that holds dev/ and proc/. nvidia-smi is also a sign: Windows, WSL and a driver that is not loaded
    show no file.
    """
    files = {"NVIDIA": ("proc/driver/nvidia/gpus", "dev/nvidia0"), "AMD": ("dev/kfd",)}
    makers = [maker for maker, signs in files.items() if any((root / sign).exists() for sign in signs)]
    if not makers and shutil.which("nvidia-smi"):
        makers = ["NVIDIA"]
    if not makers or torch.cuda.is_available():
        return []
    library, version = ("CUDA", torch.version.cuda) if makers[0] == "NVIDIA" else ("ROCm", torch.version.hip)
    if version is None:
        why = f"torch {torch.__version__} is built without {library} (docs/machines.md has the command)"
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r}; "
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            why += " ".join(str(error).split())
    return [f"an {makers[0]} GPU is here, but torch cannot use it: {why}"]


def choose_threads(requested: int | str) -> int:
    """Set and return the number of torch's CPU threads; `auto` keeps torch's default, one per usable physical core."""
    if requested != "auto":
        torch.set_num_threads(int(requested))
    return torch.get_num_threads()


def set_malloc(options: dict[int, int]) -> bool:
    """Set options of glibc's malloc, in their order. Returns whether this process has it."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        for option, value in options.items():
            set_option(option, value)
    return set_option is not None


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors for new ones, instead of returning it to the system; glibc only.

    By default glibc returns large blocks at once, and the next training step on a CPU requests them again page by page.
    This took a seventh of the step's time at andrea-120m (bench/README.md). Memory is fragmented: `RESIDENT_SHARE` in
    training/planning/memory.py.
    """
    set_malloc({MALLOC_MMAP_MAX: 0, MALLOC_TRIM_THRESHOLD: 2**31 - 1, MALLOC_TOP_PAD: 2**26})


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """After `keep_freed_memory`: large blocks that need new memory get it from the system, and return it when freed.

    Use it for work between training steps. The blocks of such work have other sizes than those of a step. They would
    fragment the memory that this process keeps, and raise the peak by more than their own size. glibc only.
    """
    set_malloc({MALLOC_MMAP_MAX: 65536})
    try:
        yield
    finally:
        set_malloc({MALLOC_MMAP_MAX: 0})


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`: restore glibc's default settings, and return unused memory to the system."""
    if set_malloc({MALLOC_MMAP_MAX: 65536, MALLOC_TRIM_THRESHOLD: 2**17, MALLOC_TOP_PAD: 0}):
        ctypes.CDLL(None).malloc_trim(0)


def choose_precision(requested: str, device: torch.device) -> Choice:
    """`auto` is bf16 where the device multiplies in it, fp16 on older GPUs, and fp32 elsewhere. Raises UserError."""
    if requested == "fp16" and device.type != "cuda":
        raise UserError(f"precision=fp16 needs a CUDA GPU, got device={device.type}; use precision=bf16 or fp32")
    if requested != "auto":
        return Choice(requested, "as configured")
    if device.type == "cuda":
        if capability_of(device) >= AMPERE:
            return Choice("bf16", "the GPU has bf16 instructions")
        return Choice("fp16", "the GPU has no bf16 instructions; the loss is scaled automatically")
    if device.type == "cpu" and cpu_multiplies_bf16():
        return Choice("bf16", "this CPU has bf16 instructions")
    return Choice("fp32", "bf16 is not faster on this device")


@torch.compiler.assume_constant_result  # torch.compile cannot trace torch's function
def capability_of(device: torch.device) -> int:
    """Compute capability times ten: 70 (V100), 75 (T4), 80, 90, …; 80 on a CPU (Triton's interpreter) and on an AMD GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return AMPERE
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@torch.compiler.assume_constant_result
def cpu_multiplies_bf16() -> bool:
    """Whether the processor has instructions for products of bf16 numbers."""
    # ATEN_CPU_CAPABILITY may hold torch to less than the processor.
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """A context in which matrix products run in `precision`; weights stay fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, WEIGHT_DTYPE[precision])


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, or None for a device that is not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class LargePages:
    """Memory for tensors that are read many times, in pages of 2 MB if Linux grants them.

    A processor prefetches only within a page, and must translate the address of each new page. Large matrices were read
    at 50 GB/s from pages of 2 MB, and at 35 GB/s from the usual pages of 4 kB (bench/README.md).
    """

    ALIGNMENT_BYTES = 64  # one cache line

    def __init__(self, n_bytes: int) -> None:
        self.memory = private_memory(max(n_bytes, 1))
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without large pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = 0

    @classmethod
    def aligned_bytes(cls, n_bytes: int) -> int:
        """The bytes that a tensor of `n_bytes` occupies, rounded up to the alignment."""
        return -(-n_bytes // cls.ALIGNMENT_BYTES) * cls.ALIGNMENT_BYTES

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in this memory, which is freed together with its last tensor. A page is occupied from its first number on."""
        n_number = math.prod(shape)
        start, self.used = self.used, self.used + self.aligned_bytes(n_number * dtype.itemsize)
        assert self.used <= len(self.memory), f"{self.used} bytes do not fit {len(self.memory)}"
        if not n_number:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=n_number, offset=start).view(shape)

    def place(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of `tensor` in this memory."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)
