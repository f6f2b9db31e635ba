"""What this machine does: a table to send, for machines that nobody of the project has (docs/machines.md).

Prints the processor, whether each of our C++ files was compiled, its errors against float64, and for each device that
torch finds ten steps of training and a sample. A row that fails says why, and the other rows go on. Nothing is sent, and
nothing is kept but the compiled files in the user's cache.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import ROOT, machine
from torch.nn import functional

from andrea.attention.implementations.native import SOURCES, reason_without_library
from andrea.generation.packed_layers import SOURCE as DECODE
from andrea.generation.packed_layers import Int8Linear, NativeLinear, library
from andrea.runtime.native import REASONS
from andrea.training.loss.loss import SOURCE as LOSS
from andrea.training.loss.loss import has_native_library

WIDTH = 768  # of the product whose error and time are shown
STEPS = 10


def main() -> None:
    about = machine("cpu")
    show("system", f"{platform.platform()} · {platform.machine()} · {about['processor']}")
    show("versions", f"Python {about['python']} · torch {about['torch']} · {about['threads']} threads")
    show("MPS", "yes" if torch.backends.mps.is_available() else "no")
    show(DECODE.name, "compiled" if library() is not None else REASONS[DECODE])
    for dtype, source in SOURCES.items():
        show(source.name, reason_without_library(dtype) or "compiled")
    show(LOSS.name, "compiled" if has_native_library() else REASONS.get(LOSS, "for processors with AVX512-BF16 only"))
    if library() is not None:
        for dtype in (torch.float32, torch.bfloat16):
            show_product(dtype)
    for device in ["cpu", *(["mps"] if torch.backends.mps.is_available() else [])]:
        with tempfile.TemporaryDirectory() as folder:
            train_and_sample(device, Path(folder))


def show(name: str, content: str) -> None:
    print(f"{name:18} {content}", flush=True)


def show_product(dtype: torch.dtype) -> None:
    """One row times a matrix: the largest error against float64, relative to the largest result, and the time."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, WIDTH, generator=generator).to(dtype) for n in (1, 4 * WIDTH))
    ours, int8 = NativeLinear(weight, None), Int8Linear(weight, None)
    rows: dict[str, tuple[Callable, torch.Tensor]] = {
        "ours": (ours, weight.double()),
        "torch's": (lambda x: functional.linear(x, weight), weight.double()),
        "ours in int8": (int8, int8.dequantised().double()),
    }
    for name, (product, exact_weight) in rows.items():
        exact = x.double() @ exact_weight.mT
        error = ((product(x).double() - exact).abs().max() / exact.abs().max()).item()
        times = []
        for _ in range(100):
            start = time.perf_counter()
            product(x)
            times.append(time.perf_counter() - start)
        kind = str(dtype).removeprefix("torch.")
        show("product", f"{kind}, {name}: error {error:.1e}, {1e6 * sorted(times)[50]:.0f} µs")


def train_and_sample(device: str, folder: Path) -> None:
    words = [f"device={device}", f"runs_dir={folder}"]
    training = ["train.py", *words, "name=machine", f"data_dir={folder}", "data=text", f"data.path={ROOT / 'docs'}"]
    training += ["logger=none", f"train.steps={STEPS}", "train.log_every=1", "train.sample_tokens=0"]
    if not succeeds(f"training, {device}", training):
        return
    lines = (folder / "machine" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = [
        record["train/tokens_per_second"] for record in map(json.loads, lines) if "train/tokens_per_second" in record
    ]
    losses = [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]
    show(
        f"training, {device}",
        f"{sorted(speeds)[len(speeds) // 2]:.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.3f}",
    )
    succeeds(f"sample, {device}", ["sample.py", *words, "checkpoint=machine", "prompt=The", "max_new_tokens=20"])


def succeeds(name: str, words: list[str]) -> bool:
    """Run a script of the project. Its standard output, or the end of its errors, becomes a row."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        show(name, f"FAILED with exit code {done.returncode}\n{done.stderr[-3000:]}")
    elif words[0] == "sample.py":
        show(name, repr(done.stdout))
    return done.returncode == 0


if __name__ == "__main__":
    main()
