"""Our C++ files, each compiled once for this processor, kept in the user's cache, and called with addresses of tensors.

Compiling a file takes a second or two. Without a compiler, torch's own kernels are used.
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

from andrea.runtime.files import replacing

# The parts of -ffast-math that let sums be vectorised, without those that break NaN.
MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
FLAGS = ["-O3", "-march=native", "-std=c++17", *MATH, "-fopenmp", "-shared", "-fPIC"]
POINTER, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def compiled_library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file. None without a compiler; None and a warning if the file does not compile."""
    compiler = shlex.split(os.environ.get("CXX", "g++")) or [""]
    if sys.platform != "linux" or shutil.which(compiler[0]) is None:
        return None
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    content = "\n".join([source.read_text(), *FLAGS, version + processor()])
    file_name = f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "andrea"
    for folder in (cache, None):
        try:
            path = (Path(tempfile.mkdtemp()) if folder is None else folder) / file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                with replacing(path) as staging:
                    subprocess.run([*compiler, *FLAGS, str(source), "-o", staging], capture_output=True, check=True)
            return ctypes.CDLL(str(path))
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip().partition("\n")[0]
            warnings.warn(f"{source.name} was not compiled; torch's kernels are used instead: {reason}", stacklevel=2)
            return None
        except OSError:  # a folder without write permission, or from which the system loads no libraries
            continue
    return None


def processor() -> str:
    """The facts that -march=native depends on. Machines that share a home directory may have different processors."""
    first_core = Path("/proc/cpuinfo").read_text().split("\n\n")[0].split("\n")
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in first_core if line.startswith(names))])


def address(tensor: Tensor | None) -> int | None:
    """The address of the tensor's first number, for a C++ function; None passes as a null pointer."""
    return None if tensor is None else tensor.data_ptr()
