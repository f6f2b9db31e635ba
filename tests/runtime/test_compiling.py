"""When torch.compile pays, and that every call of it goes through one function."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path

import pytest
import torch

import andrea
from andrea.runtime import compiling as module
from andrea.runtime.compiling import choose_compile, compile_errors, compile_graph, configure_compiler, gcc_version

CPU = torch.device("cpu")


def test_compiling_is_for_runs_that_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_compile("on", CPU, 1.0).value == "on"
    assert choose_compile("auto", CPU, 1e3).value == "off"
    assert choose_compile("auto", torch.device("mps"), 1e20).value == "off"
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert choose_compile("auto", CPU, 1e20).value == "on"
    assert choose_compile("auto", CPU, 5e13).value == "blocks"
    assert choose_compile("auto", torch.device("cuda"), 1e20).value == "on"
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert "g++" in choose_compile("auto", CPU, 1e20).why


def test_the_settings_follow_the_device_and_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config as autograd_settings
    from torch._inductor import config as compiler_settings

    allowed = {"autograd_cache_allow_custom_autograd_functions": False}
    with (
        autograd_settings.patch(allowed),
        compiler_settings.patch({"cpp.vec_isa_ok": None, "post_grad_custom_pre_pass": None}),
    ):
        for version, kind, expected in ((9, "cpu", None), (12, "cuda", None), (12, "cpu", True)):
            monkeypatch.setattr(module, "gcc_version", lambda answer=version: answer)
            monkeypatch.setattr(module.sys, "platform", "linux")
            configure_compiler(torch.device(kind))
            assert compiler_settings.cpp.vec_isa_ok is expected, (version, kind)
            assert autograd_settings.autograd_cache_allow_custom_autograd_functions


def test_compiling_for_a_cpu_says_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path, caplog) -> None:
    """torch says it when the module is loaded; its search for a CUDA compiler is called again here."""
    from torch.utils import cpp_extension

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    logger = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(logger, "propagate", False)  # torch gives its parents handlers, and takes them away again
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "disabled", False)  # other tests of this process may have configured logging
    monkeypatch.setattr(logger.manager, "disable", logging.NOTSET)
    logger.setLevel(logging.WARNING)
    cpp_extension._find_cuda_home()
    assert "No CUDA runtime is found" in caplog.text
    caplog.clear()
    configure_compiler(CPU)
    assert cpp_extension._find_cuda_home() == str(tmp_path) and not caplog.text


def test_a_compiler_is_known_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    for said, version in (("12", 12), ("9.4.0", 9), ("apple", 0)):
        compiler.write_text(f"#!/bin/sh\necho {said}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert gcc_version() == version
    monkeypatch.setenv("CXX", "clang++")
    assert gcc_version() == 0


def test_what_cannot_be_compiled_raises() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(compile_errors()):
        compile_graph(breaks)(torch.ones(3))


def test_every_call_of_torch_compile_goes_through_one_function() -> None:
    calls = [
        path.relative_to(folder).as_posix()
        for folder in [Path(andrea.__file__).parent]
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.compile"
    ]
    assert calls == ["runtime/compiling.py"]
