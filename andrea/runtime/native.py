"""C++ of ours, compiled once for this processor, kept, and called with the addresses of tensors.

A compiler takes a second or two for a file. Where there is none, torch's own kernels serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from andrea.runtime.files import replacing

# What -ffast-math allows of sums, without what it takes away: NaN stays NaN.
MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
FLAGS = ["-O3", "-march=native", "-std=c++17", *MATH, "-fopenmp", "-shared", "-fPIC"]
POINTER, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The file's functions, or None where no compiler is found that makes them."""
    compiler = shlex.split(os.environ.get("CXX", "g++")) or [""]
    if sys.platform != "linux" or shutil.which(compiler[0]) is None:
        return None
    about = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout + processor()
    name = hashlib.sha256("\n".join([source.read_text(), *FLAGS, about]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "andrea"
    for folder in (cache, None):
        try:
            path = Path(tempfile.mkdtemp() if folder is None else folder) / f"{source.stem}-{name}.so"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                with replacing(path) as staging:
                    subprocess.run([*compiler, *FLAGS, str(source), "-o", staging], capture_output=True, check=True)
            return ctypes.CDLL(str(path))
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip().partition("\n")[0]
            warnings.warn(f"{source.name} was not compiled, torch's kernels serve: {reason}", stacklevel=2)
            return None
        except OSError:  # a folder that cannot be written, or from which nothing may be loaded
            continue
    return None


def processor() -> str:
    """What -march=native depends on: machines that share a home directory may differ."""
    told = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    kept = [line for line in told.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), *kept])


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class LargePages:
    """Memory for what is read again and again, in pages of 2 MB where Linux gives them on request.

    A processor reads ahead within a page, and looks up where each one lies: on the machine where it was tried, long
    matrices were read at 50 GB/s from large pages and at 35 GB/s from the usual ones of 4 kB (bench/README.md).
    """

    ALIGNED = 64  # bytes: a line of the cache

    def __init__(self, n_bytes: int) -> None:
        self.memory = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without them
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = 0

    @classmethod
    def room_for(cls, n_bytes: int) -> int:
        """What a tensor of so many bytes takes up."""
        return -(-n_bytes // cls.ALIGNED) * cls.ALIGNED

    def place(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in this memory, which lives as long as any tensor in it."""
        start, self.used = self.used, self.used + self.room_for(tensor.nbytes)
        assert self.used <= len(self.memory), f"{self.used} bytes do not fit {len(self.memory)}"
        if not tensor.numel():
            return tensor
        placed = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return placed.view(tensor.shape).copy_(tensor)
