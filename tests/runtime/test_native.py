"""C++ is compiled once and kept; without a compiler, or with one that refuses the file, there is no library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from andrea.runtime.native import COUNT, address, compiled_library

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ file, with an empty cache to compile into."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "twice.cpp"
    path.write_text('extern "C" void twice(float* x, long n) { for (long i = 0; i < n; i++) x[i] *= 2; }')
    compiled_library.cache_clear()
    yield path
    compiled_library.cache_clear()


def test_a_library_computes_on_a_tensor(source: Path) -> None:
    tensor = torch.tensor([1.0, -3.0, float("nan")])
    compiled_library(source).twice(ctypes.c_void_p(address(tensor)), COUNT(3))
    assert torch.equal(tensor[:2], torch.tensor([2.0, -6.0])) and tensor[2].isnan()
    assert address(None) is None


def test_it_is_compiled_once_and_kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_library(source) is not None
    (kept,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert kept.suffix == ".so"
    compiled_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", only_the_version(subprocess.run))
    assert compiled_library(source) is not None


def only_the_version(run):
    def checked(command: list[str], **options):
        assert "--version" in command, f"compiled again: {command}"
        return run(command, **options)

    return checked


def test_a_changed_source_is_another_library(source: Path, tmp_path: Path) -> None:
    assert compiled_library(source) is not None
    source.write_text(source.read_text() + "// changed")
    compiled_library.cache_clear()
    assert compiled_library(source) is not None
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 2


def test_the_compiler_s_refusal_is_a_warning(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -fno-such-option")
    with pytest.warns(UserWarning, match="twice.cpp was not compiled; torch's kernels are used instead: .*no-such-opt"):
        assert compiled_library(source) is None
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_without_a_compiler_there_is_no_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert compiled_library(source) is None


def test_without_a_cache_to_write_to_it_is_compiled_elsewhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert compiled_library(source) is not None
    assert [path for path in tmp_path.rglob("*")] == [source]
