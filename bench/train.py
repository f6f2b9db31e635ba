"""Tokens per second of training steps: this project and Hugging Face's GPT-2, in the same run.

Both sides: same batch, sequence length, vocabulary, widths and depth, parameters within 2 %; forward, backward,
gradient clipping and optimizer in every step. The baseline is Hugging Face in fp32, eager.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import yaml
from common import ROOT, arguments, interleave, make_andrea, make_hugging_face, model_config, report, same_size

from andrea.attention import HeadStatistics, causal
from andrea.attention.fastest import measure
from andrea.config import ModelConfig, OptimizerConfig, parse
from andrea.training.device import autocast, choose_precision, weight_dtype
from andrea.training.loss import loss_sum
from andrea.training.optimizer import Optimizer
from andrea.training.parallel import Alone

PEERS = ("fp32", "bf16", "bf16-compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step")
    parser.add_argument("--sequence-length", type=int, help="default: the model's own")
    parser.add_argument("--steps", type=int, default=1, help="steps timed in one go")
    parser.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="this project's; theirs is AdamW"
    )
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="this project's")
    parser.add_argument("--compile", choices=("on", "off"), default="on", help="this project's")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["fp32"], help="how Hugging Face's model runs")
    parser.add_argument("--attention", default="auto", help="this project's attention.implementation")
    chosen = arguments(parser)
    config = model_config(chosen.model, chosen.sequence_length)
    shape = (chosen.batch, config.sequence_length + 1)
    text = torch.randint(chosen.vocabulary, shape, generator=torch.Generator().manual_seed(1)).to(chosen.device)
    precision = choose_precision(chosen.precision, torch.device(chosen.device)).value
    assert precision != "fp16", "fp16 needs a loss scale, which this bench leaves out; use --precision fp32"
    torch.set_float32_matmul_precision("highest")

    peer = make_hugging_face(config, chosen.vocabulary, chosen.device).train()
    attention = choose_attention(config, precision, chosen)
    andrea = make_andrea(config, chosen.vocabulary, chosen.device, attention)
    facts = {"parameters": same_size(andrea, peer), "andrea_precision": precision, "andrea_attention": attention}
    # One model and one optimizer for all of Hugging Face's rows: three would not fit a laptop.
    runs = {f"hugging face, {mode}": hugging_face_steps(peer, text, mode, chosen.steps) for mode in chosen.peers}
    name = f"andrea, {precision}{', compiled' if chosen.compile == 'on' else ''}, {chosen.optimizer}"
    runs[name] = andrea_steps(andrea, text, precision, chosen)
    report("train", chosen, interleave(runs, chosen.pairs, chosen.device), next(iter(runs)), facts)


def choose_attention(config: ModelConfig, precision: str, chosen) -> str:
    """As the trainer chooses: on a card the fastest, measured."""
    if chosen.attention != "auto" or not chosen.device.startswith("cuda"):
        return chosen.attention
    shape = (chosen.batch, config.n_head, config.n_kv_head or config.n_head, config.sequence_length, config.d_head)
    times = measure(*shape, weight_dtype(precision), torch.device(chosen.device), causal())
    print("attention, ms forward and backward:", {name: round(time, 3) for name, time in times.items()}, flush=True)
    return next(iter(times), "auto")


def hugging_face_steps(model: torch.nn.Module, text: torch.Tensor, mode: str, n_step: int) -> Callable[[], int]:
    """Their model as their documentation trains it: labels in, loss out, torch's fused AdamW."""
    if not hasattr(model, "shared_optimizer"):
        model.shared_optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    optimizer = model.shared_optimizer
    forward = torch.compile(model) if mode == "bf16-compiled" else model
    tokens = text[:, :-1].contiguous()  # the model itself shifts the labels by one

    def run() -> int:
        for _ in range(n_step):
            with autocast(tokens.device, mode.partition("-")[0]):
                loss = forward(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return n_step * tokens.numel()

    return run


def andrea_steps(model: torch.nn.Module, text: torch.Tensor, precision: str, chosen) -> Callable[[], int]:
    """The pieces the trainer uses: loss_sum under autocast, compiled; clip; the gated optimizer step."""
    values = yaml.safe_load((ROOT / "configs" / "optimizer" / f"{chosen.optimizer}.yaml").read_text(encoding="utf-8"))
    optimizer = Optimizer(Alone(model), parse(OptimizerConfig, values, "optimizer"), precision == "bf16")
    measuring = model.blocks[0].attention.implementation == "triton"  # as the trainer: our kernel measures every step

    def measured(model, tokens, targets):
        observed = [] if measuring else None
        return loss_sum(model, tokens, targets, observed), HeadStatistics.of_layers(observed) if measuring else None

    loss_of = torch.compile(measured, dynamic=False) if chosen.compile == "on" else measured
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def run() -> int:
        for _ in range(chosen.steps):
            with autocast(tokens.device, precision):
                loss = loss_of(model, tokens, targets)[0] / targets.numel()
            loss.backward()
            norm = optimizer.clip()
            optimizer.step(1.0, torch.isfinite(norm) & torch.isfinite(loss.detach()))
            optimizer.parallel.zero_gradients()
        return chosen.steps * tokens.numel()

    return run


if __name__ == "__main__":
    main()
