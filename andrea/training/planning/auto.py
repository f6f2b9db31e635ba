"""Chooses the value of each `auto` in a configuration for this machine, and gives the reason for each choice."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from andrea.attention import Case, choose, make_compatibility, packed_documents
from andrea.attention.implementations.fastest import measure
from andrea.config import RunConfig, TrainConfig, UserError
from andrea.model.gpt import make_mask, make_modifiers
from andrea.model.size import count_parameters, flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import WEIGHT_DTYPE, Choice, choose_precision, choose_threads
from andrea.text.corpus import Corpus
from andrea.training.health.attention import measures_every_step
from andrea.training.planning.micro_batch import (
    USABLE_SHARE,
    Machine,
    Placement,
    choose_sharing,
    micro_batches_that_fit,
)
from andrea.training.planning.small_text import (
    EVALUATIONS,
    decay_lines,
    epochs_of,
    for_text,
    is_planned_now_for_text,
    length_lines,
    part_lines,
)
from andrea.training.planning.time_budget import QUARTERS


@dataclass(frozen=True)
class Resolved:
    """config: with the chosen values. sharing: none, ddp or fsdp. lines: choices and reasons, for the terminal."""

    config: RunConfig
    sharing: str
    lines: list[str]


def resolve(
    config: RunConfig,
    machine: Machine,
    corpus: Corpus,
    left_auto: Collection[str] = (),
    planned_steps: int | None = None,
) -> Resolved:
    """Choose a value for every `auto`, on rank 0 for all ranks. Raises UserError for settings that cannot work here.

    left_auto: the keys that the user has left `auto`; a resumed run already has values for them. planned_steps: the length
    of a resumed run, as planned now.
    """
    device, ranks, n_vocab = machine.device, machine.ranks, corpus.tokenizer.n_vocab
    asked, config = config, for_text(config, corpus)
    evaluations = EVALUATIONS if is_planned_now_for_text(asked, config, corpus) else QUARTERS
    steps = planned_steps or config.steps
    threads = choose_threads(config.threads)
    precision = with_origin(choose_precision(config.precision, device), config.precision, "precision" in left_auto)
    flops = config.steps * config.tokens_per_step * flops_per_token(config.model, config.attention, n_vocab)
    compile_ = with_origin(choose_compile(config.compile, device, flops), config.compile, "compile" in left_auto)
    deterministic = device.type == "cpu" if config.deterministic == "auto" else config.deterministic
    sharing = choose_sharing(config, ranks, n_vocab, machine.free_bytes, precision.value)
    placement = Placement(device, precision.value, ranks.size, sharing.value == "fsdp")
    config = dataclasses.replace(
        config,
        threads=threads,
        precision=precision.value,
        compile=compile_.value,
        deterministic=deterministic,
        train=with_intervals(config, choose_micro_batch(config, machine, n_vocab, placement), evaluations),
    )
    attention = choose_attention(config, device)
    if "attention.implementation" in left_auto and config.attention.implementation != "auto":
        attention = Choice(attention.value, f"{attention.value} (chosen when the run began)")
    config = dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, implementation=attention.value)
    )
    parameters = count_parameters(config.model, config.attention, n_vocab)
    n_token = sum(len(source.train) for source in corpus.sources)
    lines = [
        f"model: {config.model.name}, {parameters.total:,} parameters · tokenizer {corpus.tokenizer.identity} · "
        f"{n_token:,} training tokens",
        f"{steps} steps of {config.tokens_per_step:,} tokens, {epochs_of(steps, config, corpus):.2f} epochs · "
        f"micro-batch: {config.train.micro_batch} of "
        f"{config.sequences_per_step} sequences" + (f" on each of {ranks.size} ranks" if ranks.size > 1 else ""),
        f"device: {describe_device(device, threads)} · {precision.value} ({precision.why})",
        *length_lines(asked, config, corpus),
        *decay_lines(asked, config, corpus),
        *part_lines(asked, config, corpus),
    ]
    if ranks.started_by_torchrun:
        lines.append(f"parallel: {sharing.value} over {ranks.size} ranks ({sharing.why})")
    lines.append(f"attention: {attention.why}")
    lines.append(f"torch.compile: {compile_.value} ({compile_.why})" + (" · deterministic" if deterministic else ""))
    return Resolved(config, sharing.value, lines)


def with_origin(choice: Choice, configured: str, is_left_auto: bool) -> Choice:
    """The choice; if an earlier process of the run has made it for a key that was left `auto`, the reason says so."""
    return Choice(choice.value, "chosen when the run began") if is_left_auto and configured != "auto" else choice


def choose_micro_batch(config: RunConfig, machine: Machine, n_vocab: int, placement: Placement) -> int:
    """Sequences in one pass of a rank: the configured number or, for `auto`, the most that the memory plan allows."""
    most = machine.ranks.local_rows(config.sequences_per_step)[2]
    if config.train.micro_batch != "auto":
        return min(config.train.micro_batch, most)
    capacity = USABLE_SHARE * machine.free_bytes
    return min(micro_batches_that_fit(config, n_vocab, placement, capacity)[0], most)


def with_intervals(config: RunConfig, micro_batch: int, evaluations: int = QUARTERS) -> TrainConfig:
    """The `train` group with numbers for the run's length, and for the intervals between evaluations and so on."""
    train, part = config.train, max(1, -(-config.steps // evaluations))
    return dataclasses.replace(
        train,
        steps=config.steps,
        tokens_per_step=config.tokens_per_step,
        micro_batch=micro_batch,
        eval_every=part if train.eval_every == "auto" else train.eval_every,
        save_every=part if train.save_every == "auto" else train.save_every,
    )


def choose_attention(config: RunConfig, device: torch.device) -> Choice:
    """The attention implementation for training. On a GPU, `auto` becomes the fastest one in a measurement made now.

    It must serve the windows of all layers.
    """
    model, dtype, n_token = config.model, WEIGHT_DTYPE[config.precision], config.model.sequence_length
    layers_of_window = Counter(map(config.attention.window_of, range(model.n_layer)))
    masks = {window: make_mask(window) for window in layers_of_window}
    if not config.attention.across_documents:  # four documents, as an example
        packing = packed_documents(torch.arange(n_token, device=device)[None, None] * 4 // n_token)
        masks = {window: mask & packing for window, mask in masks.items()}
    n_kv_head = model.n_kv_head or model.n_head
    compatibility = make_compatibility(config.attention.compatibility, model.n_head, model.head_width, n_kv_head)
    shapes = [(1, n_head, n_token, model.head_width) for n_head in (model.n_head, n_kv_head)]
    query, key = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    asked, measured = config.attention.implementation, measures_every_step(config.attention)
    try:
        compiled = config.compile != "off"
        sink = torch.empty(model.n_head, device=device, requires_grad=True) if config.attention.sink else None
        how = {"modifiers": make_modifiers(model, config.attention), "sink": sink}
        cases = {
            window: Case(query, key, key, compatibility, mask, statistics=measured, compiled=compiled, **how)
            for window, mask in masks.items()
        }
        chosen = [choose(asked, case) for case in cases.values()]
    except ValueError as error:
        raise UserError(f"attention.{error}; choose another, or attention.implementation=auto") from None
    reasons = "; ".join(dict.fromkeys(f"{name} ({why})" for name, why in chosen))
    if asked != "auto" or device.type != "cuda" or measured or not compatibility.lowers:
        return Choice(asked, reasons)
    with deterministic_mode(config.deterministic is True):  # what torch then refuses is left out
        measured_times = [measure(case, config.train.micro_batch, compiled) for case in cases.values()]
    times = milliseconds_a_layer(measured_times, list(layers_of_window.values()))
    if not times:
        return Choice(asked, reasons)
    fastest = next(iter(times))
    shown = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    return Choice(fastest, f"{fastest} (fastest here, forward and backward: {shown})")


@contextmanager
def deterministic_mode(wanted: bool) -> Iterator[None]:
    """The mode in which a run trains, while this is open."""
    is_strict, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,
    )
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_strict, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def milliseconds_a_layer(times: list[dict[str, float]], layers: list[int]) -> dict[str, float]:
    """The mean time of a layer by implementation, fastest first. Implementations that miss in one of `times` are left out.

    times: the measurement of each window. layers: the number of layers that have this window.
    """
    served = [name for name in times[0] if all(name in each for each in times)]
    mean = {name: sum(n * each[name] for n, each in zip(layers, times, strict=True)) / sum(layers) for name in served}
    return dict(sorted(mean.items(), key=lambda item: item[1]))


def describe_device(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device}, {threads} threads" if device.type == "cpu" else str(device)
