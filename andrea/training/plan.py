"""What a run will cost, before it costs anything: parameters, FLOPs, memory, time; and the micro-batch that follows."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from andrea.config import Text, TrainingRun, UserError
from andrea.model.size import Memory, count_parameters, flops_per_token, plan_memory
from andrea.text.tokenizer import configured_tokenizer
from andrea.training.console import duration, short
from andrea.training.device import choose_device, choose_precision
from andrea.training.resume import measured_pace

TOKENS_AT_A_TIME_ON_CPU = 4096  # more than this in one pass is no faster on a CPU, and takes more memory
GPT2_VOCABULARY = 50257  # tiktoken's gpt2, end-of-text included


def planned_vocabulary(run: TrainingRun) -> int:
    """Tokens in the vocabulary: of the one that `tokenizer.path` names, or of the one that will be made."""
    if run.tokenizer.path:
        return configured_tokenizer(run.tokenizer).n_vocab
    if run.tokenizer.kind == "bpe":
        assert run.tokenizer.vocab_size is not None
        return run.tokenizer.vocab_size
    return 257 if run.tokenizer.kind == "byte" else GPT2_VOCABULARY


def complete(run: TrainingRun) -> TrainingRun:
    """The run with what follows from its size filled in: its steps, and {model}, {tokens} and {seed} in its name."""
    train = run.train
    if train.tokens_per_parameter is not None or train.flops is not None:
        n_vocab = planned_vocabulary(run)
        if train.flops is not None:
            key, tokens = f"flops={train.flops:g}", train.flops / flops_per_token(run.model, run.attention, n_vocab)
        else:
            key = f"tokens_per_parameter={train.tokens_per_parameter:g}"
            tokens = train.tokens_per_parameter * count_parameters(run.model, run.attention, n_vocab).total
        steps = max(1, round(tokens / run.tokens_per_step))
        if train.steps not in ("auto", steps):
            raise UserError(
                f"train.steps={train.steps} and train.{key}, which makes {steps}; set train.steps=auto or leave one out"
            )
        run = dataclasses.replace(run, train=dataclasses.replace(train, steps=steps))
    if run.name is None:
        return run
    seen = {"{model}": run.model.name, "{tokens}": short(run.steps * run.tokens_per_step), "{seed}": str(run.seed)}
    name = str(run.name)
    for placeholder, value in seen.items():
        name = name.replace(placeholder, value)
    return dataclasses.replace(run, name=Text(name))


def choose_micro_batch(run: TrainingRun, n_vocab: int, device: torch.device, precision: str) -> int:
    """The largest divisor of the step's sequences whose planned memory fits; at least 1."""
    sequences = run.sequences_per_step
    room = 0.8 * free_bytes(device)
    most = sequences
    if device.type == "cpu":
        most = max(1, min(most, TOKENS_AT_A_TIME_ON_CPU // run.model.sequence_length))
    one = memory_of(run, n_vocab, 1, precision)
    fixed = one.total - one.activations
    divisors = [n for n in range(1, most + 1) if sequences % n == 0]
    return max((n for n in divisors if fixed + n * one.activations < room), default=1)


def memory_of(run: TrainingRun, n_vocab: int, micro_batch: int, precision: str) -> Memory:
    return plan_memory(
        run.model, run.attention, n_vocab, micro_batch=micro_batch, precision=precision, optimizer=run.optimizer.kind
    )


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now, in bytes: the card's, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return 1024 * next(
            int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")
        )
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def describe(run: TrainingRun) -> str:
    """The plan as lines of text, for `dry_run=true`."""
    n_vocab = planned_vocabulary(run)
    device = choose_device(run.device)
    precision = choose_precision(run.precision, device)
    parameters = count_parameters(run.model, run.attention, n_vocab)
    per_token = flops_per_token(run.model, run.attention, n_vocab)
    chosen = run.train.micro_batch
    micro_batch = choose_micro_batch(run, n_vocab, device, precision.value) if chosen == "auto" else chosen
    memory = memory_of(run, n_vocab, micro_batch, precision.value)
    tokens = run.steps * run.tokens_per_step
    pace = measured_pace(Path(run.runs_dir), run.model.name)
    time = (
        f"{duration(tokens / pace[0])} at {pace[0]:,.0f} tokens/s, measured in {pace[1]}"
        if pace
        else "not measured yet: known after the first steps of a run"
    )
    gib = 2**30
    rows = [
        ("model", f"{run.model.name}, {n_vocab:,} tokens in the vocabulary, T = {run.model.sequence_length}"),
        ("parameters", f"{parameters.total:,}"),
        ("  embedding", f"{parameters.embedding:,}"),
        ("  attention", f"{parameters.attention:,}"),
        ("  mlp", f"{parameters.mlp:,}"),
        ("  norm", f"{parameters.norm:,}"),
        ("  head", f"{parameters.head:,}" + (" (tied to the embedding)" if run.model.tied_head else "")),
        ("FLOPs per token", f"{per_token:,} (forward and backward)"),
        ("memory", f"{memory.total / gib:.2f} GiB with {micro_batch} of {run.sequences_per_step} sequences at a time"),
        ("  weights", f"{memory.weights / gib:.2f} GiB"),
        ("  gradients", f"{memory.gradients / gib:.2f} GiB"),
        ("  optimizer", f"{memory.optimizer / gib:.2f} GiB ({run.optimizer.kind})"),
        ("  activations", f"{memory.activations / gib:.2f} GiB"),
        ("free here", f"{free_bytes(device) / gib:.2f} GiB on {device}, {precision.value} ({precision.why})"),
        ("tokens per step", f"{run.tokens_per_step:,}"),
        ("micro-batch", f"{micro_batch} sequences"),
        ("steps", f"{run.steps:,}"),
        ("tokens", f"{tokens:,}"),
        ("FLOPs", f"{tokens * per_token:.3g}"),
        ("expected time", time),
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in rows)
