"""What is chosen on this machine, and that each choice says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from andrea.config import UserError
from andrea.runtime import device as module
from andrea.runtime.device import (
    autocast,
    choose_compile,
    choose_device,
    choose_precision,
    choose_threads,
    gcc_version,
    peak_flops,
)
from andrea.training.optimizer.loss_scale import GROWTH_INTERVAL, LossScale

CPU = torch.device("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="not on this machine"):
            choose_device("cuda:0")


def test_threads_are_at_least_one_and_as_asked() -> None:
    assert choose_threads(3) == 3 and choose_threads("auto") >= 1


def test_precision_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("fp32", CPU).value == "fp32"
    with pytest.raises(UserError, match="fp16 needs a CUDA card"):
        choose_precision("fp16", CPU)
    for multiplies, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(module, "cpu_multiplies_bf16", lambda answer=multiplies: answer)
        assert choose_precision("auto", CPU).value == expected
    for capability, expected in (((9, 0), "bf16"), ((7, 5), "fp16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert choose_precision("auto", torch.device("cuda")).value == expected


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


def test_matrix_products_run_in_the_precision_chosen() -> None:
    x = torch.ones(2, 2)
    with autocast(CPU, "bf16"):
        assert (x @ x).dtype == torch.bfloat16
    with autocast(CPU, "fp32"):
        assert (x @ x).dtype == torch.float32


def test_a_compiler_is_known_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    for said, version in (("12", 12), ("9.4.0", 9), ("apple", 0)):
        compiler.write_text(f"#!/bin/sh\necho {said}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert gcc_version() == version
    monkeypatch.setenv("CXX", "clang++")
    assert gcc_version() == 0


FAULTS = """
import resource, torch
from andrea.runtime.device import keep_freed_memory
if {kept}: keep_freed_memory()
for _ in range(9):
    torch.ones(1 << 24) + 1  # 64 MB, twice
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept_for_the_next_tensors() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", FAULTS.format(kept=kept)], capture_output=True, text=True).stdout)
        for kept in (False, True)
    ]
    assert faults[1] < faults[0] / 2


def test_peaks_are_known_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(CPU) is None
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Other", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, answer=name: answer)
        assert peak_flops(torch.device("cuda")) == peak


def test_the_loss_scale_halves_on_overflow_and_doubles_after_long_peace() -> None:
    scale = LossScale(CPU, active=True)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 2.0**16)
    scale.unscale([parameter])
    assert torch.equal(parameter.grad, torch.ones(3))
    scale.update(torch.tensor(False))
    assert scale.state() == [2.0**15, 0.0] and scale.may_back_off()
    for _ in range(GROWTH_INTERVAL):
        scale.update(torch.tensor(True))
    assert scale.state() == [2.0**16, 0.0]
    for _ in range(20):
        scale.update(torch.tensor(False))
    assert not scale.may_back_off()
    scale.load_state([4.0, 3.0])
    assert scale.state() == [4.0, 3.0]


def test_without_fp16_the_scale_is_one_and_excuses_nothing() -> None:
    scale = LossScale(CPU, active=False)
    scale.update(torch.tensor(False))
    assert scale.state() == [1.0, 0.0] and not scale.may_back_off()
