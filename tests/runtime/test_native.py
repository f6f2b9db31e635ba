"""C++ is compiled once and kept; without a compiler, or with one that refuses the file, there is no library."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from andrea.runtime import native
from andrea.runtime.native import COUNT, REASONS, address, compiled_library

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
    kept = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert len(kept) == 2 and kept[0].endswith(".so") and kept[1] == kept[0] + ".sha256"
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
    assert "no-such-opt" in REASONS[source]


def test_the_reason_is_the_first_error_not_the_line_that_names_its_function(source: Path) -> None:
    source.write_text("int one() { return two; }\n")
    with pytest.warns(UserWarning, match="error: .*two"):
        assert compiled_library(source) is None


def test_without_a_compiler_there_is_no_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert compiled_library(source) is None
    assert REASONS[source] == "no C++ compiler is found (/no/such/compiler); install g++"


def test_without_a_cache_to_write_to_it_is_compiled_elsewhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    temporary = temporary_folder(tmp_path, monkeypatch)
    assert twice(source) == 6
    assert not list(temporary.iterdir()) and sorted(tmp_path.iterdir()) == sorted([source, temporary])


def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, for this process and its children."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def twice(source: Path) -> float:
    """2 · 3, computed by the compiled library."""
    tensor = torch.tensor([3.0])
    compiled_library(source).twice(ctypes.c_void_p(address(tensor)), COUNT(1))
    return tensor.item()


@pytest.mark.parametrize("damage", ["truncated", "zeroed", "checksum", "no checksum"])
def test_a_damaged_library_is_built_again(damage: str, source: Path, tmp_path: Path) -> None:
    assert twice(source) == 6
    (library,) = (tmp_path / "cache").rglob("*.so")
    checksum, whole = library.with_name(library.name + ".sha256"), library.read_bytes()
    library.unlink()  # this process still uses the old file, which must not change
    contents = {"truncated": whole[: len(whole) // 2], "zeroed": whole[:4096] + bytes(len(whole) - 4096)}
    library.write_bytes(contents.get(damage, whole))
    if "checksum" in damage:
        checksum.unlink() if damage == "no checksum" else checksum.write_bytes(b"\xff")
    compiled_library.cache_clear()
    assert twice(source) == 6
    assert library.read_bytes() == whole and checksum.read_text() == hashlib.sha256(whole).hexdigest()


def test_other_options_of_the_compiler_are_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiler in ("g++", "g++ -DOTHER", "g++ -D OTHER"):
        monkeypatch.setenv("CXX", compiler)
        assert twice(source) == 6
        compiled_library.cache_clear()
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 3


@pytest.mark.parametrize("bug", ["__builtin_trap();", "undefined();"])
def test_a_library_that_cannot_be_loaded_is_a_warning(bug: str, source: Path, tmp_path: Path) -> None:
    source.write_text(f"void undefined(); __attribute__((constructor)) void at_load() {{ {bug} }}")
    with pytest.warns(
        UserWarning, match="twice.cpp was not compiled; torch's kernels .*the compiled library cannot be"
    ):
        assert compiled_library(source) is None
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("compiler", "reason"), [("g++ '", "No closing quotation"), ("{}", "Exec format error")])
def test_a_compiler_that_cannot_be_called_is_a_warning(
    compiler: str, reason: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "no-program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", compiler.format(program))
    with pytest.warns(UserWarning, match=f"torch's kernels are used instead: .*{reason}"):
        assert compiled_library(source) is None


def test_without_a_home_it_is_compiled_for_this_process(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)

    def nobody(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    temporary = temporary_folder(tmp_path, monkeypatch)
    assert twice(source) == 6 and not list(temporary.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("whose", ["andrea", "andrea/*.so", "andrea/*.sha256"])
def test_what_another_user_owns_is_not_loaded(whose: str, source: Path, tmp_path: Path) -> None:
    assert twice(source) == 6
    (owned,) = (tmp_path / "cache").glob(whose)
    os.chown(owned, 12345, 12345)
    (library,) = (tmp_path / "cache").rglob("*.so")
    before = library.stat().st_ino
    compiled_library.cache_clear()
    assert twice(source) == 6
    kept_elsewhere = whose == "andrea"  # nothing is written there either
    assert (library.stat().st_ino == before) == kept_elsewhere


def test_a_cache_that_others_can_write_to_is_closed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "andrea"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert twice(source) == 6 and cache.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def like_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This module as on macOS, as far as Linux can show it: the folder of torch's libraries, which is empty."""
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    monkeypatch.setattr(torch, "__file__", str(libraries.parent / "__init__.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(native, "processor", lambda: "Apple M1")  # asked of a program that Linux may lack
    native.openmp.cache_clear()
    yield libraries
    native.openmp.cache_clear()


def test_on_macos_threads_are_those_of_torch_s_own_openmp(like_macos: Path) -> None:
    """No other: a second OpenMP in the process would end it."""
    own = like_macos / "libomp.dylib"
    own.touch()
    options, first = native.openmp()
    assert "-fopenmp" in options and first == [str(own)]


def test_on_macos_without_openmp_there_is_one_thread(
    source: Path, like_macos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++")
    source.write_text("#ifdef _OPENMP\n#error threads\n#endif\n" + source.read_text())
    assert twice(source) == 6


def test_on_macos_the_compiler_is_clang(source: Path, like_macos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert compiled_library(source) is None and "clang++" in REASONS[source]


def test_elsewhere_nothing_is_compiled(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert compiled_library(source) is None
    assert REASONS[source] == "our C++ is compiled on Linux and macOS only"
