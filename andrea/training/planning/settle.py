"""What a configuration leaves `auto`, settled by what is there: device, precision, compiling, attention, sharing, micro-batch."""

from __future__ import annotations

import dataclasses

import torch

from andrea.attention import Case, choose, make_compatibility, packed_documents
from andrea.attention.implementations.fastest import measure
from andrea.config import RunConfig, UserError
from andrea.model.gpt import make_mask
from andrea.model.size import count_parameters, flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import Choice, choose_device, choose_precision, choose_threads, weight_dtype
from andrea.text.corpus import Corpus
from andrea.training.float8 import check_float8
from andrea.training.parallel.ranks import Ranks
from andrea.training.planning import plan
from andrea.training.records.console import Console


def settle(
    run: RunConfig, device: torch.device, ranks: Ranks, room: float, corpus: Corpus, console: Console
) -> tuple[RunConfig, str]:
    """Replace every `auto` by what it means here, and say what and why; rank 0 settles for all.

    Also how the ranks share the work: none, ddp or fsdp. room: bytes that each of them has.
    """
    threads = choose_threads(run.threads)
    precision = choose_precision(run.precision, device)
    if run.float8:
        check_float8(run.model, device, precision.value)
    per_token = flops_per_token(run.model, run.attention, corpus.tokenizer.n_vocab)
    compile_ = choose_compile(run.compile, device, run.steps * run.tokens_per_step * per_token)
    deterministic = device.type == "cpu" if run.deterministic == "auto" else run.deterministic
    parallel = choose_parallel(run, ranks, corpus.tokenizer.n_vocab, room, precision.value)
    micro_batch, sharded = run.train.micro_batch, parallel.value == "fsdp"
    if micro_batch == "auto":
        micro_batch = plan.micro_batches_that_fit(
            run, corpus.tokenizer.n_vocab, device, precision.value, plan.ROOM * room, ranks.size, sharded
        )[0]
    _, _, rows = ranks.local_rows(run.sequences_per_step)
    quarter = max(1, -(-run.steps // 4))
    eval_every = quarter if run.train.eval_every == "auto" else run.train.eval_every
    train = dataclasses.replace(
        run.train,
        steps=run.steps,
        tokens_per_step=run.tokens_per_step,
        micro_batch=min(micro_batch, rows),
        eval_every=eval_every,
        save_every=quarter if run.train.save_every == "auto" else run.train.save_every,
        attention_every=max(1, run.steps // 20) if run.train.attention_every == "auto" else run.train.attention_every,
        sample_every=eval_every if run.train.sample_every == "auto" else run.train.sample_every,
    )
    run = dataclasses.replace(
        run,
        threads=threads,
        precision=precision.value,
        compile=compile_.value,
        deterministic=deterministic,
        train=train,
    )
    attention = choose_attention(run, device, precision.value, compile_.value, train.micro_batch)
    run = dataclasses.replace(run, attention=dataclasses.replace(run.attention, implementation=attention.value))
    parameters = count_parameters(run.model, run.attention, corpus.tokenizer.n_vocab)
    console.say(
        f"model: {run.model.name}, {parameters.total:,} parameters · tokenizer {corpus.tokenizer.identity} · "
        f"{sum(len(source.train) for source in corpus.sources):,} training tokens"
    )
    console.say(
        f"{run.steps} steps of {run.tokens_per_step:,} tokens, {train.micro_batch} of {run.sequences_per_step} sequences at a time"
        + (f" on each of {ranks.size} ranks" if ranks.size > 1 else "")
    )
    console.say(f"device: {device_words(device, threads)} · {precision.value} ({precision.why})")
    if run.float8:
        console.say("float8: the blocks' matrices are multiplied in 8 bits")
    if ranks.started_by_torchrun:
        console.say(f"parallel: {parallel.value} over {ranks.size} ranks ({parallel.why})")
    console.say(f"attention: {attention.why}")
    console.say(f"torch.compile: {compile_.value} ({compile_.why})" + (" · deterministic" if deterministic else ""))
    return run, parallel.value


def measures_every_step(run: RunConfig) -> bool:
    """Our kernel measures the heads in the pass that trains; QK-clip needs their largest logits whatever it costs."""
    return run.attention.implementation == "triton" or run.attention.qk_clip is not None


def choose_attention(run: RunConfig, device: torch.device, precision: str, compile_: str, micro_batch: int) -> Choice:
    """The implementation training will use: on a card the fastest of those that serve the case, measured now."""
    model, dtype, n_token = run.model, weight_dtype(precision), run.model.sequence_length
    mask = make_mask(run.attention)
    if not run.attention.across_documents:
        mask = mask & packed_documents(torch.arange(n_token, device=device)[None, None] * 4 // n_token)  # say, four
    compatibility = make_compatibility(run.attention.compatibility, model.n_head, model.d_head)
    n_kv_head = model.n_kv_head or model.n_head
    shapes = [(1, n_head, n_token, model.d_head) for n_head in (model.n_head, n_kv_head)]
    query, key = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    asked, measured = run.attention.implementation, measures_every_step(run)
    try:
        case = Case(query, key, key, compatibility, mask, statistics=measured, compiled=compile_ != "off")
        name, why = choose(asked, case)
    except ValueError as error:
        raise UserError(f"attention.{error}; choose another, or attention.implementation=auto") from None
    if asked != "auto" or device.type != "cuda" or measured or not compatibility.lowers:
        return Choice(asked, f"{name} ({why})")
    times = measure(case, micro_batch)
    if not times:
        return Choice(asked, f"{name} ({why})")
    fastest = next(iter(times))
    shown = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    return Choice(fastest, f"{fastest} (fastest here, forward and backward: {shown})")


def device_words(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device}, {threads} threads" if device.type == "cpu" else str(device)


def choose_device_of_rank(asked: str, ranks: Ranks) -> torch.device:
    """Each rank has a card of its own, which it stands on by now. Raises UserError where there are too few."""
    device = choose_device(asked)
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.size > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"device={asked} is one device, and there are {ranks.size} ranks; use device=cuda or device=cpu"
        )
    if 1 < cards < ranks.local_size:  # one card may be another one for each rank, as SLURM hands them out
        raise UserError(f"{ranks.local_size} ranks on this machine have {cards} cards; use --nproc-per-node={cards}")
    return device


def room_of_a_rank(device: torch.device, ranks: Ranks) -> float:
    """Bytes that each rank may count on: those of the one that has least; ranks share the memory of a CPU."""
    sharing = ranks.local_size if device.type == "cpu" else 1
    return float(ranks.minimum(torch.tensor(plan.free_bytes(device) / sharing)))


def choose_parallel(run: RunConfig, ranks: Ranks, n_vocab: int, room: float, precision: str) -> Choice:
    """none, ddp or fsdp. Raises UserError for what these ranks cannot do."""
    chosen, sharing = Choice(run.parallel.kind, "as asked"), run.parallel.shard_ranks
    if run.parallel.kind == "auto":
        if not ranks.started_by_torchrun:
            return Choice("none", "one process")
        chosen = plan.choose_parallel(run, n_vocab, ranks.size, room, precision)
    if chosen.value == "fsdp" and not ranks.started_by_torchrun:
        raise UserError(
            "parallel=fsdp shards a model over the ranks of torchrun, and there are none; start with "
            "`torchrun --standalone --nproc-per-node=2 train.py …`, or choose parallel=auto"
        )
    if sharing and ranks.size % sharing:
        raise UserError(
            f"parallel.shard_ranks={sharing} does not divide the {ranks.size} ranks; use a divisor, or null: all of them"
        )
    return chosen
