"""Device, threads, precision and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from andrea.config import UserError
from andrea.runtime import device as module
from andrea.runtime.device import (
    LargePages,
    autocast,
    choose_device,
    choose_precision,
    choose_threads,
    peak_flops,
    unused_gpu,
)
from andrea.runtime.free_and_peak_memory import is_out_of_memory

CPU = torch.device("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="not on this machine"):
            choose_device("cuda:0")


CPU_BUILD = f"torch {torch.__version__} is built without CUDA (docs/machines.md has the command)"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver"


@pytest.mark.parametrize(
    ("sign", "build", "hidden", "why"),
    [
        ("proc/driver/nvidia/gpus/0000:00:04.0", None, None, CPU_BUILD),
        ("nvidia-smi", None, "", CPU_BUILD),  # to show it would not help
        ("dev/kfd", None, None, CPU_BUILD.replace("CUDA", "ROCm")),
        ("dev/nvidia0", "13.0", None, OLD_DRIVER.replace("\n", " ")),
        ("dev/nvidia0", "13.0", "", "CUDA_VISIBLE_DEVICES=''; " + OLD_DRIVER.replace("\n", " ")),
        ("dev/null", "13.0", None, None),
    ],
)
def test_one_line_says_why_torch_cannot_use_the_card_that_is_there(
    sign: str, build: str | None, hidden: str | None, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError(OLD_DRIVER)

    (tmp_path / sign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / sign).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    maker = "AMD" if sign == "dev/kfd" else "NVIDIA"
    expected = [f"an {maker} GPU is here, but torch cannot use it: {why}"] if why else []
    assert unused_gpu(tmp_path) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unused_gpu(tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that has no GPU to use")
def test_train_and_sample_say_why_they_run_without_the_card(
    tmp_path: Path, tiny_run, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this machine's own torch, which finds no card."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = "an NVIDIA GPU is here, but torch cannot use it: "
    assert tiny_run("name=a", "train.steps=2", "train.sample_tokens=0") == 0
    assert capsys.readouterr().out.count(said) == 1
    sample = [f"checkpoint={tmp_path / 'runs' / 'a'}", "max_new_tokens=1"]
    assert script("sample")(sample) == 0
    captured = capsys.readouterr()
    assert captured.err.count(said) == 1 and said not in captured.out
    assert script("sample")([*sample, "device=cpu"]) == 0
    assert said not in capsys.readouterr().err
    with pytest.raises(UserError, match=f"device=cuda is not on this machine; available: .*; {said}"):
        choose_device("cuda")


def test_threads_are_at_least_one_and_as_asked() -> None:
    assert choose_threads(3) == 3 and choose_threads("auto") >= 1


def test_precision_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("fp32", CPU).value == "fp32"
    with pytest.raises(UserError, match="fp16 needs a CUDA GPU"):
        choose_precision("fp16", CPU)
    for multiplies, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(module, "cpu_multiplies_bf16", lambda answer=multiplies: answer)
        assert choose_precision("auto", CPU).value == expected
    for capability, expected in (((9, 0), "bf16"), ((7, 5), "fp16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert choose_precision("auto", torch.device("cuda")).value == expected


def test_matrix_products_run_in_the_precision_chosen() -> None:
    x = torch.ones(2, 2)
    with autocast(CPU, "bf16"):
        assert (x @ x).dtype == torch.bfloat16
    with autocast(CPU, "fp32"):
        assert (x @ x).dtype == torch.float32


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


APART = """
import os, torch
from andrea.runtime.device import keep_freed_memory, large_blocks_apart
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
keep_freed_memory()
before = resident()
with large_blocks_apart():
    torch.ones(1 << 26)  # 256 MB
apart = resident()
torch.ones(1 << 26)
print(apart - before, resident() - apart)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_large_blocks_apart_are_returned_where_others_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True)
    apart, kept = map(int, done.stdout.split())
    assert apart < 64 and kept > 192


def test_memory_that_is_not_there_is_told_as_such_and_not_as_a_file() -> None:
    with pytest.raises(MemoryError, match="Cannot allocate memory") as error:
        LargePages(1 << 60)
    assert is_out_of_memory(error.value)


def test_peaks_are_known_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(CPU) is None
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Other", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, answer=name: answer)
        assert peak_flops(torch.device("cuda")) == peak


def test_large_pages_hold_the_tensors_placed_in_them() -> None:
    tensors = [torch.randn(5, 3), torch.arange(7, dtype=torch.int8), torch.randn(0), torch.randn(64).bfloat16()]
    pages = LargePages(sum(LargePages.aligned_bytes(tensor.nbytes) for tensor in tensors))
    placed = [pages.place(tensor) for tensor in tensors]
    for tensor, copied in zip(tensors, placed, strict=True):
        assert torch.equal(tensor, copied) and copied.data_ptr() % LargePages.ALIGNMENT_BYTES == 0
    with pytest.raises(AssertionError, match="do not fit"):
        pages.place(torch.randn(1))
    del pages
    assert torch.equal(placed[3], tensors[3])
