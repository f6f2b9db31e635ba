"""The plan: micro-batches that fit, how ranks share a model, and what dry_run says of it."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from andrea.api.command_line import configure
from andrea.attention import multihead
from andrea.config import RunConfig
from andrea.training.planning.dry_run import describe, on_cards
from andrea.training.planning.length import planned_vocabulary
from andrea.training.planning.memory import (
    CARD,
    GIB,
    TOKENS_IN_PASS_ON_CPU,
    USABLE_SHARE,
    Placement,
    memory_of,
    micro_batches_that_fit,
    pass_bytes,
    sharing_that_fits,
)

pytestmark = pytest.mark.untraced

V = 31
WIDTH = len("  python and libraries ")  # of the names in a dry run's lines
TINY = ["model.d_model=24", "model.n_layer=3", "model.n_head=3", "model.d_mlp=40", "model.sequence_length=11"]
TINY += ["model.bigram_rows=null"]  # its gradient would be most of the memory, whatever the batch
CPU = Placement(torch.device("cpu"), "fp32")
ON_CARD = Placement(CARD, "fp32")


def tiny_run(*words: str) -> RunConfig:
    return configure(RunConfig, "train", [*TINY, f"train.tokens_per_step={11 * 30}", *words])


def total(run: RunConfig, n_sequence: int) -> int:
    return memory_of(run, V, n_sequence, ON_CARD).total


def test_what_fits_is_every_divisor_up_to_the_room() -> None:
    run = tiny_run()
    capacity = total(run, 6)
    fit = micro_batches_that_fit(run, V, ON_CARD, capacity)
    assert fit == [6, 5, 3, 2, 1]
    assert micro_batches_that_fit(run, V, ON_CARD, 2 * total(run, 30))[0] == 30
    assert micro_batches_that_fit(run, V, ON_CARD, 0) == [1]  # trying it will tell
    assert micro_batches_that_fit(run, V, replace(ON_CARD, ranks=6), 2 * total(run, 30))[0] == 5


def test_recomputation_leaves_room_for_more() -> None:
    run, recomputing = tiny_run(), tiny_run("train.activation_checkpointing=true")
    capacity = total(run, 6)
    most = [micro_batches_that_fit(each, V, ON_CARD, capacity)[0] for each in (run, recomputing)]
    assert most[0] < most[1]


@pytest.mark.parametrize("n_sequence", [2, 6, 15])
def test_between_two_counts_the_plan_is_not_below_a_count_of_its_own(n_sequence: int) -> None:
    """Activations follow a chord: whatever is said to fit does fit by its own count."""
    run = tiny_run("train.activation_checkpointing=true")
    capacity = total(run, n_sequence)
    fit = micro_batches_that_fit(run, V, ON_CARD, capacity)
    assert all(total(run, n) <= capacity for n in fit)


def test_on_a_cpu_python_and_libraries_count_and_a_pass_is_kept_short() -> None:
    run = tiny_run("compile=off")
    on_cpu, on_card = (memory_of(run, V, 3, place) for place in (CPU, ON_CARD))
    passes = on_cpu.activations + on_cpu.optimizer_step - max(on_card.activations, on_card.optimizer_step)
    other = on_cpu.python_and_libraries + on_cpu.evaluation + passes
    assert on_cpu.python_and_libraries > 0 and on_cpu.total == on_card.total + other
    compiled = memory_of(tiny_run("compile=on"), V, 3, CPU)
    assert compiled.python_and_libraries > on_cpu.python_and_libraries
    long = configure(RunConfig, "train", ["train.tokens_per_step=1048576"])
    fit = micro_batches_that_fit(long, V, CPU, 2**50)
    assert fit[0] * long.model.sequence_length == TOKENS_IN_PASS_ON_CPU


@pytest.mark.parametrize(("ranks", "enough", "too_little"), [(1, "none", "fsdp"), (5, "ddp", "fsdp")])
def test_ranks_hold_the_whole_model_where_it_fits_beside_a_sequence(ranks: int, enough: str, too_little: str) -> None:
    run = tiny_run()
    needed = total(run, 1) / USABLE_SHARE
    assert sharing_that_fits(run, V, replace(ON_CARD, ranks=ranks), needed + 1).value == enough
    choice = sharing_that_fits(run, V, replace(ON_CARD, ranks=ranks), needed - 1)
    assert choice.value == too_little and "MiB" in choice.why
    assert ("sharded over 5 ranks, it needs" in choice.why) == (ranks == 5)  # one rank cannot share the model


@pytest.mark.slow
@pytest.mark.parametrize("on_card", [True, False])
def test_a_plan_is_counted_with_the_operators_of_its_device(on_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not this machine could compile the convolution for CPUs: a card has an operator of its own."""
    heads = pytest.importorskip("andrea.attention.kernels.heads_triton")
    called: list[str] = []

    def of_card(*inputs):
        called.append("card")
        return own(*inputs)

    def of_cpu(x: Tensor, taps: Tensor) -> Tensor:
        called.append("cpu")
        return x.clone()

    own = heads.prepared_heads
    monkeypatch.setattr(heads, "prepared_heads", of_card)
    monkeypatch.setattr(multihead.native, "native_convolution", of_cpu)
    monkeypatch.setattr(multihead.native, "reason_without_library", lambda *dtype: None)
    run = tiny_run("model.d_head=16", "precision=bf16")
    pass_bytes.cache_clear()
    memory_of(run, V, 2, Placement(CARD if on_card else torch.device("cpu"), "bf16"))
    pass_bytes.cache_clear()
    assert set(called) == {"card" if on_card else "cpu"} and not multihead.planned_for_card


def test_a_dry_run_says_how_the_largest_size_lies_on_one_card_and_on_eight() -> None:
    run = configure(RunConfig, "train", ["model=andrea-2b", "tokenizer=gpt2", "train.micro_batch=1"])
    lines = {line[:WIDTH].strip(): line[WIDTH:] for line in describe(run).splitlines()}
    assert "micro-batch: " in lines["on 1 GPU of 80 GB"] and "weights 8.2" in lines["on 1 GPU of 80 GB"]
    assert lines["on 1 GPU of 24 GB"].startswith("does not fit: ")
    assert lines["on 8 GPUs of 80 GB"].startswith("ddp, bf16")
    parts = memory_of(run, planned_vocabulary(run), 1, replace(CPU, precision="bf16"))
    assert lines["weights"] == f"{parts.weights / GIB:.2f} GiB" and "python and libraries" in lines


def test_a_dry_run_plans_no_more_sequences_in_a_pass_than_a_step_has() -> None:
    lines = describe(tiny_run(f"runs_dir=/none{os.getpid()}", "tokenizer=byte", "train.micro_batch=1000")).splitlines()
    (memory,) = [line for line in lines if line.startswith("memory ")]
    assert memory.endswith("micro-batch: 30 of 30 sequences") and lines.index("micro-batch            30 sequences")


@pytest.mark.slow  # forty blocks, differentiated without memory: Python all through
def test_a_dry_run_names_the_windows() -> None:
    words = [f"runs_dir=/none{os.getpid()}", "tokenizer=byte"]
    assert "keys that a query" not in describe(tiny_run(*words))
    lines = describe(tiny_run(*words, "attention.window=[4, 4, null]")).splitlines()
    (line,) = [line for line in lines if line.startswith("keys that a query sees")]
    assert line.endswith(" at most 4 in 2 layers, then all in 1 layer")


@pytest.mark.parametrize("model", ["andrea-120m", "andrea-480m"])
def test_a_consumer_card_holds_all_sizes_but_the_largest(model: str) -> None:
    run = configure(RunConfig, "train", [f"model={model}", "tokenizer=gpt2"])
    assert re.match(r"bf16, micro-batch: \d+ sequences, [\d.]+ GiB per GPU ", on_cards(run, 50257, 1, 24))


@pytest.mark.slow
def test_a_dry_run_says_where_a_model_does_not_fit() -> None:
    words = ["model=andrea-2b", "tokenizer=gpt2", "train.micro_batch=1"]
    run = configure(RunConfig, "train", words)
    run = replace(run, model=replace(run.model, n_layer=40))
    assert on_cards(run, 50257, 1, 80).startswith("does not fit")
    assert on_cards(run, 50257, 8, 80).startswith("fsdp, bf16")
