"""Our C++ files, each compiled once for this processor, kept in the user's cache, and called with tensors' addresses.

Compiling a file takes a second or two. Without a compiler, torch's own kernels are used. A damaged library would end
the process when it is loaded or called. Therefore a new library is first loaded in a separate process, and its checksum
is kept next to it. A library with another checksum is compiled again. A folder that another user can write to is not
used.
"""

import contextlib
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

import torch
from torch import Tensor

from andrea.runtime.code_cache import cache_folder
from andrea.runtime.files import file_sha256, replace_text, replacing
from andrea.runtime.system import user_id

# The parts of -ffast-math that let sums be vectorised, without those that break NaN.
MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
# On ARM -march=native is unknown to older versions of clang, and elsewhere -mcpu=native to all.
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ["-O3", NATIVE, "-std=c++17", *MATH, "-shared", "-fPIC"]
POINTER, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
LONGEST_LOAD_SECONDS = 60
LOAD = "import ctypes, sys; [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in sys.argv[1:]]"
REASONS: dict[Path, str] = {}  # why `compiled_library` has no functions of a file


class NotCompiled(Exception):
    """The compiler refuses the file. The message is its first error."""


@functools.cache
def compiled_library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file; None, with a reason in REASONS and a warning of faults, if it cannot be compiled here."""
    if sys.platform not in ("linux", "darwin"):
        REASONS[source] = "our C++ is compiled on Linux and macOS only"
        return None
    try:
        compiler = shlex.split(os.environ.get("CXX", "g++" if sys.platform == "linux" else "clang++")) or [""]
        if shutil.which(compiler[0]) is None:
            REASONS[source] = f"no C++ compiler is found ({compiler[0] or 'CXX is empty'}); install g++"
            return None
        for library in openmp()[1]:
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        compiler += [*FLAGS, *openmp()[0]]
        name, folder = library_name(source, compiler), cache_folder()
        if folder is not None:
            with contextlib.suppress(OSError):  # the disk is full, or the system loads no libraries from this folder
                return kept_library(folder / name, source, compiler)
        with tempfile.TemporaryDirectory() as temporary:
            build(Path(temporary) / name, source, compiler)
            return ctypes.CDLL(str(Path(temporary) / name))  # usable after its file is removed
    except (NotCompiled, OSError, ValueError) as error:  # ValueError: a quote in CXX is not closed
        reason = REASONS[source] = str(error).partition("\n")[0]
        warnings.warn(f"{source.name} was not compiled; torch's kernels are used instead: {reason}", stacklevel=2)
        return None


@functools.cache
def openmp() -> tuple[list[str], list[str]]:
    """The compiler's options for threads, and the libraries that must be loaded first. Both are empty without threads.

    On macOS only the OpenMP that torch itself has loaded will do: a second one, such as Homebrew's, would end the process
    (github.com/pytorch/pytorch/issues/78490). Apple's clang has none, and that of torch's wheel cannot be linked, because
    the file names a place where it is not. Therefore its functions are found at loading, as in torch's own extensions.
    """
    if sys.platform != "darwin":
        return ["-fopenmp"], []
    places = Path(torch.__file__).parent / "lib", Path(sys.prefix) / "lib"  # of torch's wheel, of conda
    found = [str(place / "libomp.dylib") for place in places if (place / "libomp.dylib").exists()]
    return ["-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup"] if found else [], found[:1]


def library_name(source: Path, compiler: list[str]) -> str:
    """The file name, with a hash of everything that the compiled code depends on."""
    answer = subprocess.run([*compiler, "--version"], capture_output=True, stdin=subprocess.DEVNULL).stdout
    content = [source.read_text(encoding="utf-8"), *compiler, answer.decode(errors="replace"), processor()]
    return f"{source.stem}-{hashlib.sha256(chr(0).join(content).encode()).hexdigest()[:16]}.so"


def kept_library(path: Path, source: Path, compiler: list[str]) -> ctypes.CDLL:
    """The library at `path`, which is built first if it is missing or damaged. Raises OSError and NotCompiled."""
    checksum = path.with_name(path.name + ".sha256")
    if not is_intact(path, checksum):
        with replacing(path) as staging:
            build(staging, source, compiler)
            digest = file_sha256(staging)
        replace_text(checksum, digest)
    return ctypes.CDLL(str(path))


def is_intact(path: Path, checksum: Path) -> bool:
    """Whether both files belong to this user, and the library has the checksum."""
    try:
        is_own = all(file.stat().st_uid == user_id() for file in (path, checksum))
        return is_own and checksum.read_bytes() == file_sha256(path).encode()
    except OSError:
        return False


def build(path: Path, source: Path, compiler: list[str]) -> None:
    """Compile the file, and load the library in a separate process. Raises NotCompiled, or OSError if loading fails."""
    compiled = subprocess.run([*compiler, str(source), "-o", path], capture_output=True)
    if compiled.returncode:
        lines = compiled.stderr.decode(errors="replace").strip().split("\n")  # the first may only name a function
        first_error = next((line for line in lines if "error" in line), lines[0])
        raise NotCompiled(first_error or f"{compiler[0]} ended with exit code {compiled.returncode}")
    try:
        command = [sys.executable, "-I", "-S", "-c", LOAD, *openmp()[1], str(path)]
        loaded = subprocess.run(command, capture_output=True, timeout=LONGEST_LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"the compiled library does not load within {LONGEST_LOAD_SECONDS} s") from None
    if loaded.returncode:
        reason = loaded.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"the compiled library cannot be loaded (exit code {loaded.returncode}) {reason}".strip())


def processor() -> str:
    """The facts that NATIVE depends on. Machines that share a home directory may have different processors."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    first_core = Path("/proc/cpuinfo").read_text().split("\n\n")[0].split("\n")
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in first_core if line.startswith(names))])


def address(tensor: Tensor | None) -> int | None:
    """The address of the tensor's first number, for a C++ function; None passes as a null pointer."""
    return None if tensor is None else tensor.data_ptr()
