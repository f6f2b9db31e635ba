"""Memory and time of head and loss, forward and backward, at a model's shape: written out, fused eager, fused compiled.

    python bench/loss.py --model andrea-120m --batch 64 --how fused-compiled

Memory is what is held at the most beside hidden vectors and weights, gradients included. On a CPU each way has a process
of its own, and memory is what the process grew by: of the compiled way also what compiling took.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._inductor.compile_fx  # before anything is measured: its own memory is none of the loss's
from common import Report, arguments, interleave, model_config, serve, start_workers
from torch.nn import functional

from andrea.model.gpt import softcap
from andrea.runtime.device import keep_freed_memory
from andrea.runtime.free_and_peak_memory import peak_memory_bytes
from andrea.training.loss.loss import fused_cross_entropy

WAYS = ("written-out", "fused", "fused-compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--how", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    chosen = arguments(parser)
    if chosen.worker:
        contest(chosen)
        return
    workers = start_workers(chosen.how)

    def held() -> dict[str, int]:
        """Bytes held at the most beside hidden vectors and weights."""
        facts = {name: worker.facts for name, worker in workers.items() if "peak_memory_bytes" in worker.facts}
        return {name: about["peak_memory_bytes"] - about["before_bytes"] for name, about in facts.items()}

    report = Report("loss", chosen, chosen.how[0], lambda: {"held_bytes": held()})
    speeds = interleave({name: worker.turn for name, worker in workers.items()}, chosen.pairs, report.save)
    for name, n_byte in held().items():
        print(f"{name:20} held {n_byte / 1e9:.2f} GB beside hidden vectors and weights")
    report.show(speeds)


def contest(chosen: argparse.Namespace) -> None:
    device = torch.device(chosen.device)
    if device.type == "cpu":
        keep_freed_memory()
    config = model_config(chosen.model)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[chosen.precision]
    n_token = chosen.batch * config.sequence_length
    hidden = torch.randn(n_token, config.d_model, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(chosen.vocabulary, config.d_model, device=device).div_(config.d_model**0.5).requires_grad_()
    targets = torch.randint(chosen.vocabulary, (n_token,), device=device)

    def written_out() -> torch.Tensor:
        logits = functional.linear(hidden, weight.to(dtype))
        logits = logits if config.logit_softcap is None else softcap(logits, config.logit_softcap)
        return functional.cross_entropy(logits.float(), targets, reduction="sum")

    def fused() -> torch.Tensor:
        return fused_cross_entropy(hidden, weight, targets, config.logit_softcap, dtype)

    way = written_out if chosen.worker == "written-out" else fused
    if chosen.worker.endswith("compiled"):
        way = torch.compile(way, fullgraph=True, dynamic=False)

    def run() -> int:
        way().backward()
        hidden.grad = weight.grad = None
        return n_token

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else peak_memory_bytes(device)
    serve(run, chosen.device, before_bytes=before)


if __name__ == "__main__":
    main()
