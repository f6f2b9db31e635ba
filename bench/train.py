"""Tokens per second of training steps: this project and Hugging Face's GPT-2, in the same run.

Both sides: same sequences in a step, sequence length, vocabulary, widths and depth, parameters within 2 %; forward,
backward, gradient clipping and optimizer in every step. Each contestant has a process of its own and takes turns with the
others: what this project settles for its process (device.py: keep_freed_memory) is not settled for them, but for those
named "kept", to show what it gives them. One whose process ends is named, and the others go on. The ratio's baseline is
the first. With --profile N this project alone makes steps: the N kernels that take most of one, and the time when none runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import (
    RESULTS,
    Report,
    arguments,
    assert_same_size,
    count_weights,
    interleave,
    make_andrea,
    make_hugging_face,
    model_config,
    optimizer_config,
    serve,
    start_workers,
    timed,
    write_record,
)

from andrea.attention import Case, DotProduct, causal
from andrea.attention.implementations.fastest import measure
from andrea.config import ModelConfig
from andrea.runtime.compiling import configure_compiler
from andrea.runtime.device import WEIGHT_DTYPE, autocast, choose_precision, keep_freed_memory
from andrea.training.loss.loss import MicroBatchLoss
from andrea.training.optimizer import Optimizer
from andrea.training.parallel.ranks import Parallel

PEERS = ("fp32", "fp32-compiled", "bf16", "bf16-compiled", "bf16-compiled-kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--peer-batch", type=int, help="theirs, where memory is short; as many sequences in a step")
    parser.add_argument("--sequence-length", type=int, help="default: the model's own")
    parser.add_argument("--steps", type=int, default=1, help="steps timed in one go")
    parser.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="this project's; theirs is AdamW"
    )
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="this project's")
    parser.add_argument("--compile", choices=("on", "blocks", "off"), default="on", help="this project's")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["fp32"], help="how Hugging Face's model runs")
    parser.add_argument("--attention", default="auto", help="this project's attention.implementation")
    parser.add_argument(
        "--profile", type=int, metavar="N", help="show the N kernels that take most of this project's step"
    )
    chosen = arguments(parser)
    if chosen.worker:
        contest(chosen)
        return
    if chosen.profile:
        show_profile(chosen)
        return
    names = [f"hugging face, {mode}" for mode in chosen.peers]
    names.append(
        f"andrea, {chosen.precision}{dict(on=', compiled', blocks=', blocks compiled', off='')[chosen.compile]}, {chosen.optimizer}"
    )
    workers = start_workers(names)
    assert_same_size(worker.facts["parameters"] for worker in workers.values())
    report = Report(
        "train", chosen, names[0], lambda: {"contestants": {name: worker.facts for name, worker in workers.items()}}
    )
    report.show(interleave({name: worker.turn for name, worker in workers.items()}, chosen.pairs, report.save))


def contest(chosen: argparse.Namespace) -> None:
    """What a contestant's process does."""
    torch.set_float32_matmul_precision("highest")
    who, _, mode = chosen.worker.partition(", ")
    config = model_config(chosen.model, chosen.sequence_length)
    n_sequence = chosen.batch * chosen.accumulate
    batch = chosen.peer_batch or chosen.batch if who == "hugging face" else chosen.batch
    assert n_sequence % batch == 0, f"--peer-batch {batch} does not divide the {n_sequence} sequences of a step"
    shape = (n_sequence // batch, batch, config.sequence_length + 1)
    text = torch.randint(chosen.vocabulary, shape, generator=torch.Generator().manual_seed(1)).to(chosen.device)
    if chosen.device == "cpu" and (who == "andrea" or mode.endswith("kept")):
        keep_freed_memory()
    if who == "hugging face":
        peer = make_hugging_face(config, chosen.vocabulary, chosen.device).train()
        run, warm = hugging_face_steps(peer, text, mode, chosen.steps)
        serve(run, chosen.device, warm if chosen.accumulate > 1 else None, parameters=count_weights(peer), batch=batch)
        return
    run, warm, facts = own_steps(config, text, chosen)
    serve(run, chosen.device, warm if chosen.accumulate > 1 else None, batch=batch, **facts)


def own_steps(config: ModelConfig, text: torch.Tensor, chosen) -> tuple[Callable[[], int], Callable[[], None], dict]:
    """This project's steps and warm-up, and what it has chosen. text (micro-batches, sequences, T + 1)."""
    precision = choose_precision(chosen.precision, torch.device(chosen.device)).value
    assert precision != "fp16", "fp16 needs a loss scale, which this bench leaves out; use --precision fp32"
    attention = choose_attention(config, precision, chosen)
    andrea = make_andrea(config, chosen.vocabulary, chosen.device, attention)
    run, warm = andrea_steps(andrea, text, precision, chosen)
    return run, warm, {"parameters": count_weights(andrea), "precision": precision, "attention": attention}


def show_profile(chosen: argparse.Namespace) -> None:
    """One step by torch's profiler, which slows it down; step_ms is without it. The kernels are of one stream."""
    torch.set_float32_matmul_precision("highest")
    config = model_config(chosen.model, chosen.sequence_length)
    shape = (chosen.accumulate, chosen.batch, config.sequence_length + 1)
    text = torch.randint(chosen.vocabulary, shape, generator=torch.Generator().manual_seed(1)).to(chosen.device)
    run, _, facts = own_steps(config, text, chosen)
    for _ in range(3):
        n_token, seconds = timed(run, chosen.device)
    with torch.profiler.profile() as profiled:
        timed(run, chosen.device)
    on_card = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
    on_card = [event for event in on_card if event.device_type != torch.autograd.DeviceType.CPU]
    rows = [{"name": event.key, "count": event.count, "ms": event.self_device_time_total / 1000} for event in on_card]
    rows.sort(key=lambda row: -row["ms"])
    kernels_ms = sum(row["ms"] for row in rows)
    facts |= {"step_ms": round(1000 * seconds, 2), "tokens_per_second": round(n_token / seconds)}
    facts |= {"kernels_ms": round(kernels_ms, 2), "launches": sum(row["count"] for row in rows)}
    print(facts, flush=True)
    for row in rows[: chosen.profile]:
        print(f"{row['ms']:9.3f} ms {row['ms'] / kernels_ms:6.1%} {row['count']:6} × {row['name'][:100]}")
    output = chosen.output or RESULTS / f"profile-{chosen.model}-{chosen.device}.json"
    write_record(output, "profile", chosen.device, {"model": chosen.model} | facts | {"kernels": rows})


def choose_attention(config: ModelConfig, precision: str, chosen) -> str:
    """As the trainer chooses: on a card the fastest, measured."""
    if chosen.attention != "auto" or not chosen.device.startswith("cuda"):
        return chosen.attention
    n_head = config.n_head, config.n_kv_head or config.n_head
    heads = [(1, n, config.sequence_length, config.head_width) for n in n_head]
    options = {"dtype": WEIGHT_DTYPE[precision], "device": chosen.device, "requires_grad": True}
    query, key = (torch.empty(shape, **options) for shape in heads)
    times = measure(Case(query, key, key, DotProduct(), causal()), chosen.batch, chosen.compile != "off")
    print("attention, ms forward and backward:", {name: round(time, 3) for name, time in times.items()}, flush=True)
    return next(iter(times), "auto")


Steps = tuple[Callable[[], int], Callable[[], None]]  # --steps steps, and one forward and backward pass to warm up


def hugging_face_steps(model: torch.nn.Module, text: torch.Tensor, mode: str, n_step: int) -> Steps:
    """Their model as their documentation trains it: labels in, loss out, torch's fused AdamW.

    text (micro-batches, sequences, T + 1).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if "compiled" in mode else model
    tokens = text[..., :-1].contiguous()  # the model itself shifts the labels by one

    def backward(micro_batch: torch.Tensor) -> None:
        with autocast(tokens.device, mode.partition("-")[0]):
            loss = forward(micro_batch, labels=micro_batch, use_cache=False).loss
        (loss / len(tokens)).backward()

    def run() -> int:
        for _ in range(n_step):
            for micro_batch in tokens:
                backward(micro_batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return n_step * tokens.numel()

    def warm() -> None:
        backward(tokens[0])
        optimizer.zero_grad(set_to_none=True)

    return run, warm


def andrea_steps(model: torch.nn.Module, text: torch.Tensor, precision: str, chosen) -> Steps:
    """The pieces the trainer uses: its loss, compiled; clip; the gated optimizer step. text (micro-batches, sequences, T + 1)."""
    parallel = Parallel(model)
    optimizer = Optimizer(parallel, optimizer_config(chosen.optimizer), precision == "bf16")
    measuring = model.blocks[0].attention.implementation == "triton"  # as the trainer: our kernel measures every step
    micro = MicroBatchLoss(model, text.device, precision, measuring, False)
    configure_compiler(text.device)
    loss_of = parallel.wrap(micro, chosen.compile)
    tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()

    def backward(index: int) -> torch.Tensor:
        loss = loss_of(tokens[index], targets[index])[0] / targets.numel()
        loss.backward()
        return loss.detach()

    def run() -> int:
        for _ in range(chosen.steps):
            loss = sum(backward(index) for index in range(len(tokens)))
            norm = optimizer.clip()
            optimizer.step(1.0, torch.isfinite(norm) & torch.isfinite(loss))
            optimizer.parallel.zero_gradients()
        return chosen.steps * tokens.numel()

    def warm() -> None:
        backward(0)
        optimizer.parallel.zero_gradients()

    return run, warm


if __name__ == "__main__":
    main()
