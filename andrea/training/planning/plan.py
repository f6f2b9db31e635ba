"""What a run will cost, before it costs anything: parameters, FLOPs, memory, time; and the micro-batch that follows."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from andrea.config import RunConfig, Text, UserError
from andrea.model.size import count_parameters, flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import Choice, choose_device, choose_precision
from andrea.text.tokenizer import configured_tokenizer
from andrea.training.float8 import check_float8
from andrea.training.planning.memory import Memory, plan_memory
from andrea.training.records.format import format_duration, format_number
from andrea.training.resume import measured_pace

TOKENS_AT_A_TIME_ON_CPU = 4096  # more than this in one pass is no faster on a CPU, and takes more memory
GPT2_VOCABULARY = 50257  # tiktoken's gpt2, end-of-text included
GIB = 2**30
ROOM = 0.8  # share of the free memory that a plan may fill
CARD = torch.device("cuda")
CARD_BYTES = 78 * 2**30  # free on a card of 80 GB


def planned_vocabulary(run: RunConfig) -> int:
    """Tokens in the vocabulary: of the one that `tokenizer.path` names, or of the one that will be made."""
    if run.tokenizer.path:
        return configured_tokenizer(run.tokenizer).n_vocab
    if run.tokenizer.kind == "bpe":
        assert run.tokenizer.vocab_size is not None
        return run.tokenizer.vocab_size
    return 257 if run.tokenizer.kind == "byte" else GPT2_VOCABULARY


def complete(run: RunConfig) -> RunConfig:
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
    seen = {
        "{model}": run.model.name,
        "{tokens}": format_number(run.steps * run.tokens_per_step),
        "{seed}": str(run.seed),
    }
    name = str(run.name)
    for placeholder, value in seen.items():
        name = name.replace(placeholder, value)
    return dataclasses.replace(run, name=Text(name))


def choose_micro_batch(run: RunConfig, n_vocab: int, device: torch.device, precision: str) -> int:
    """The largest divisor of a step's sequences that is planned to fit in the room there is now; at least 1."""
    return micro_batches_that_fit(run, n_vocab, device, precision, ROOM * free_bytes(device))[0]


def micro_batches_that_fit(
    run: RunConfig,
    n_vocab: int,
    device: torch.device,
    precision: str,
    room: float,
    ranks: int = 1,
    sharded: bool = False,
) -> list[int]:
    """The divisors of a rank's sequences of a step that are planned to fit in `room` bytes, from the largest down; 1 is
    among them whatever is planned.
    """
    sequences = -(-run.sequences_per_step // ranks)
    most = sequences
    if device.type == "cpu":
        most = max(1, min(most, TOKENS_AT_A_TIME_ON_CPU // run.model.sequence_length))
    one, all_ = (memory_of(run, n_vocab, n, device, precision, ranks, sharded) for n in (1, most))
    # What a pass holds is the larger of several moments, each linear in n: between two counts the chord lies above it,
    # so that counting begins only where the chord says that nothing more fits.
    slope = (all_.activations - one.activations) / max(1, most - 1)
    fit = [1]
    for n in (n for n in range(2, most + 1) if sequences % n == 0):
        by_chord = dataclasses.replace(one, activations=one.activations + round(slope * (n - 1)))
        if by_chord.total > room and memory_of(run, n_vocab, n, device, precision, ranks, sharded).total > room:
            break
        fit.append(n)
    return fit[::-1]


def choose_parallel(run: RunConfig, n_vocab: int, ranks: int, bytes_per_rank: float, precision: str) -> Choice:
    """ddp where each rank has room for the whole model, its gradients and state beside one sequence, else fsdp; with one
    rank: none, where that fits.
    """
    room = ROOM * bytes_per_rank
    whole = memory_of(run, n_vocab, 1, CARD, precision).total
    why = f"the whole model with one sequence needs {whole / GIB:.1f} GiB, of {room / GIB:.1f} that a rank may fill"
    if whole <= room:
        return Choice("ddp" if ranks > 1 else "none", why)
    shared = memory_of(run, n_vocab, 1, CARD, precision, ranks, sharded=True).total
    return Choice("fsdp", why + (f"; shared by {ranks}, {shared / GIB:.1f}" if ranks > 1 else ""))


def memory_of(
    run: RunConfig,
    n_vocab: int,
    micro_batch: int,
    device: torch.device,
    precision: str,
    ranks: int = 1,
    sharded: bool = False,
) -> Memory:
    flops = run.steps * run.tokens_per_step * flops_per_token(run.model, run.attention, n_vocab)
    return plan_memory(
        run.model,
        run.attention,
        n_vocab,
        micro_batch=micro_batch,
        precision=precision,
        optimizer=run.optimizer.kind,
        recompute=run.train.activation_checkpointing,
        compiled=choose_compile(run.compile, device, flops).value != "off",
        on_cpu=device.type == "cpu",
        ranks=ranks,
        sharded=sharded,
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


def describe(run: RunConfig) -> str:
    """The plan as lines of text, for `dry_run=true`."""
    n_vocab = planned_vocabulary(run)
    device = choose_device(run.device)
    precision = choose_precision(run.precision, device)
    if run.float8:
        check_float8(run.model, device, precision.value)
    parameters = count_parameters(run.model, run.attention, n_vocab)
    per_token = flops_per_token(run.model, run.attention, n_vocab)
    chosen = run.train.micro_batch
    micro_batch = choose_micro_batch(run, n_vocab, device, precision.value) if chosen == "auto" else chosen
    memory = memory_of(run, n_vocab, micro_batch, device, precision.value)
    tokens = run.steps * run.tokens_per_step
    pace = measured_pace(Path(run.runs_dir), run.model.name)
    time = (
        f"{format_duration(tokens / pace[0])} at {pace[0]:,.0f} tokens/s, measured in {pace[1]}"
        if pace
        else "not measured yet: known after the first steps of a run"
    )
    of_step = f"{micro_batch} of {run.sequences_per_step} sequences at a time"
    rows = [
        ("model", f"{run.model.name}, {n_vocab:,} tokens in the vocabulary, T = {run.model.sequence_length}"),
        ("parameters", f"{parameters.total:,}"),
        ("  embedding", f"{parameters.embedding:,}"),
        ("  attention", f"{parameters.attention:,}"),
        ("  mlp", f"{parameters.mlp:,}"),
        ("  norm", f"{parameters.norm:,}"),
        ("  head", f"{parameters.head:,}" + (" (tied to the embedding)" if run.model.tied_head else "")),
        ("FLOPs per token", f"{per_token:,} (forward and backward)"),
        ("memory", f"{memory.total / GIB:.2f} GiB at the peak, {of_step}"),
        *((f"  {part}", f"{gib:.2f} GiB") for part, gib in parts_in_gib(memory).items()),
        ("free here", f"{free_bytes(device) / GIB:.2f} GiB on {device}, {precision.value} ({precision.why})"),
        ("on 1 × 80 GB", on_cards(run, n_vocab, 1)),
        ("on 8 × 80 GB", on_cards(run, n_vocab, 8)),
        ("tokens per step", f"{run.tokens_per_step:,}"),
        ("micro-batch", f"{micro_batch} sequences"),
        ("steps", f"{run.steps:,}"),
        ("tokens", f"{tokens:,}"),
        ("FLOPs", f"{tokens * per_token:.3g}"),
        ("expected time", time),
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in rows)


def on_cards(run: RunConfig, n_vocab: int, ranks: int) -> str:
    """How the run would lie on so many cards of 80 GB: shared how, how many sequences at a time, GiB a card by part."""
    precision = "bf16" if run.precision == "auto" else run.precision
    chosen = choose_parallel(run, n_vocab, ranks, CARD_BYTES, precision)
    sharded = chosen.value == "fsdp" and ranks > 1
    micro_batch = micro_batches_that_fit(run, n_vocab, CARD, precision, ROOM * CARD_BYTES, ranks, sharded)[0]
    memory = memory_of(run, n_vocab, micro_batch, CARD, precision, ranks, sharded)
    if memory.total > ROOM * CARD_BYTES:
        return f"does not fit: {chosen.why}; train.activation_checkpointing=true takes less"
    parts = " · ".join(f"{part} {gib:.1f}" for part, gib in parts_in_gib(memory).items())
    how = f"{chosen.value}, " if ranks > 1 else ""
    return f"{how}{precision}, {micro_batch} sequences at a time: {memory.total / GIB:.1f} GiB a card ({parts})"


def parts_in_gib(memory: Memory) -> dict[str, float]:
    """The parts that are not empty. Activations and update are not there at the same time."""
    return {name: n_byte / GIB for name, n_byte in dataclasses.asdict(memory).items() if n_byte}
