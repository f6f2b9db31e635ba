"""C++ of ours, compiled once for this processor, kept, and called with the addresses of tensors.

A compiler takes a second or two for a file. Where there is none, torch's own kernels serve.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from torch import Tensor

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
    for folder in (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "andrea", None):
        try:
            path = Path(tempfile.mkdtemp() if folder is None else folder) / f"{source.stem}-{name}.so"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as beside:
                    made = subprocess.run([*compiler, *FLAGS, str(source), "-o", beside.name], capture_output=True)
                if made.returncode:
                    os.unlink(beside.name)
                    said = made.stderr.decode(errors="replace").strip().partition("\n")[0]
                    warnings.warn(f"{source.name} was not compiled, torch's kernels serve: {said}", stacklevel=2)
                    return None
                os.replace(beside.name, path)
            return ctypes.CDLL(str(path))
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
