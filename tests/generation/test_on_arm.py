"""decode.cpp compiled for ARM by g++ and clang, and run under an emulator against twins in float64 (decode_twins.cpp)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from andrea.generation.packed_layers import SOURCE
from andrea.runtime.native import FLAGS, NATIVE

TWINS = Path(__file__).with_name("decode_twins.cpp")
# clang: without threads, as on a Mac whose torch has no OpenMP of its own
COMPILERS = {"g++": ["aarch64-linux-gnu-g++", "-fopenmp"], "clang": ["clang++", "--target=aarch64-linux-gnu"]}
PROCESSORS = ["armv8-a", "armv8.2-a+dotprod", "armv8.6-a"]  # the last has products of bf16


def run_twins(folder: Path, compile_: list[str], emulator: list[str]) -> str:
    program = folder / "twins"
    flags = [flag for flag in FLAGS if flag not in (NATIVE, "-shared", "-fPIC")]
    subprocess.run([*compile_, *flags, f"-I{SOURCE.parent}", str(TWINS), "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long  # compilers and emulators: about a minute
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_kernels_for_arm_err_no_more_than_their_roundings(compiler, processor, tmp_path):
    for tool in (COMPILERS[compiler][0], "aarch64-linux-gnu-g++", "qemu-aarch64"):  # clang links with g++'s libraries
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    compile_ = [*COMPILERS[compiler], f"-march={processor}", "-static"]
    assert "block" in run_twins(tmp_path, compile_, ["qemu-aarch64", "-cpu", "max"])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("width", ["-march=native", "-mno-avx"])
def test_here_they_do_not_either(width, tmp_path):
    """The twins themselves: on this processor the kernels are judged by test_packed_weights.py as well."""
    if width == "-mno-avx" and platform.machine() != "x86_64":
        pytest.skip("needs x86-64")
    assert "block" in run_twins(tmp_path, ["g++", "-fopenmp", width], [])
