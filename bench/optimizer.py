"""What an optimizer step costs, clipping included: ours with Muon, ours with AdamW, torch's own Muon beside them.

    python bench/optimizer.py --model andrea-120m

The share is of a training step of --tokens-per-step tokens at --tokens-per-second, which bench/train.py measures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import Report, arguments, interleave, make_andrea, model_config, optimizer_config, timed

from andrea.training.optimizer import Optimizer, group_parameters
from andrea.training.parallel.ranks import Parallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-step", type=int, default=524288)
    parser.add_argument("--tokens-per-second", type=float, default=560000.0, help="of training with Muon")
    parser.add_argument("--steps", type=int, default=20, help="steps timed in one go")
    chosen = arguments(parser)
    model = make_andrea(model_config(chosen.model), chosen.vocabulary, chosen.device)
    generator = torch.Generator(device=chosen.device).manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, device=chosen.device, generator=generator) / 1000
    runs = {f"andrea, {kind}": ours(model, kind) for kind in ("muon", "adamw")}
    runs["torch, muon and adamw"] = torch_s_own(model)

    def several(run: Callable[[], None]) -> int:
        for _ in range(chosen.steps):
            run()
        return chosen.steps * chosen.tokens_per_step

    report = Report("optimizer", chosen, next(iter(runs)))
    turns = {name: lambda run=run: timed(lambda: several(run), chosen.device) for name, run in runs.items()}
    speeds = interleave(turns, chosen.pairs, report.save)
    seconds = {name: chosen.tokens_per_step / statistics.median(each) for name, each in speeds.items()}
    rest = chosen.tokens_per_step / chosen.tokens_per_second - seconds["andrea, muon"]  # the same for all
    share = {name: its_own / (rest + its_own) for name, its_own in seconds.items()}
    for name, its_own in seconds.items():
        print(f"{name:24} {1000 * its_own:9.2f} ms a step, {share[name]:6.2%} of it")
    report.facts = lambda: {"share_of_step": share}
    report.show(speeds)


def ours(model: torch.nn.Module, kind: str) -> Callable[[], None]:
    optimizer = Optimizer(Parallel(model), optimizer_config(kind), bf16=True)

    def run() -> None:
        norm = optimizer.clip()
        optimizer.step(1e-6, torch.isfinite(norm))  # a small rate: the weights are the next run's too

    return run


def torch_s_own(model: torch.nn.Module) -> Callable[[], None]:
    matrices = list(group_parameters(dict(model.named_parameters()))["matrix"].values())
    others = [parameter for parameter in model.parameters() if not any(parameter is each for each in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-6), torch.optim.AdamW(others, lr=1e-6, fused=True)]

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
