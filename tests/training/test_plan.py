"""The plan: micro-batches that fit, how ranks share a model, and what dry_run says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from andrea.cli.command_line import configure
from andrea.config import RunConfig
from andrea.training.planning import plan

V = 31
TINY = ["model.d_model=24", "model.n_layer=3", "model.n_head=3", "model.d_mlp=40", "model.sequence_length=11"]
CPU = torch.device("cpu")


def tiny_run(*words: str) -> RunConfig:
    return configure(RunConfig, "train", [*TINY, f"train.tokens_per_step={11 * 30}", *words])


def total(run: RunConfig, n_sequence: int, **shared) -> int:
    return plan.memory_of(run, V, n_sequence, plan.CARD, "fp32", **shared).total


def test_what_fits_is_every_divisor_up_to_the_room() -> None:
    run = tiny_run()
    room = total(run, 6)
    fit = plan.micro_batches_that_fit(run, V, plan.CARD, "fp32", room)
    assert fit == [6, 5, 3, 2, 1]
    assert plan.micro_batches_that_fit(run, V, plan.CARD, "fp32", 2 * total(run, 30))[0] == 30
    assert plan.micro_batches_that_fit(run, V, plan.CARD, "fp32", 0) == [1]  # trying it will tell
    assert plan.micro_batches_that_fit(run, V, plan.CARD, "fp32", 2 * total(run, 30), ranks=6)[0] == 5


def test_recomputation_leaves_room_for_more() -> None:
    run, recomputing = tiny_run(), tiny_run("train.activation_checkpointing=true")
    room = total(run, 6)
    most = [plan.micro_batches_that_fit(each, V, plan.CARD, "fp32", room)[0] for each in (run, recomputing)]
    assert most[0] < most[1]


@pytest.mark.parametrize("n_sequence", [2, 6, 15])
def test_between_two_counts_the_plan_is_not_below_a_count_of_its_own(n_sequence: int) -> None:
    """Activations follow a chord: whatever is said to fit does fit by its own count."""
    run = tiny_run("train.activation_checkpointing=true")
    room = total(run, n_sequence)
    fit = plan.micro_batches_that_fit(run, V, plan.CARD, "fp32", room)
    assert all(total(run, n) <= room for n in fit)


def test_on_a_cpu_the_program_counts_and_a_pass_is_kept_short() -> None:
    run = tiny_run("compile=off")
    on_cpu = plan.memory_of(run, V, 3, CPU, "fp32")
    assert on_cpu.program > 0 and on_cpu.total - on_cpu.program - on_cpu.look == total(run, 3)
    compiled = plan.memory_of(tiny_run("compile=on"), V, 3, CPU, "fp32")
    assert compiled.program > on_cpu.program
    long = configure(RunConfig, "train", ["train.tokens_per_step=1048576"])
    fit = plan.micro_batches_that_fit(long, V, CPU, "fp32", 2**50)
    assert fit[0] * long.model.sequence_length == plan.TOKENS_AT_A_TIME_ON_CPU


@pytest.mark.parametrize(("ranks", "enough", "too_little"), [(1, "none", "fsdp"), (5, "ddp", "fsdp")])
def test_ranks_hold_the_whole_model_where_it_fits_beside_a_sequence(ranks: int, enough: str, too_little: str) -> None:
    run = tiny_run()
    needed = total(run, 1) / plan.ROOM
    assert plan.choose_parallel(run, V, ranks, needed + 1, "fp32").value == enough
    choice = plan.choose_parallel(run, V, ranks, needed - 1, "fp32")
    assert choice.value == too_little and "GiB" in choice.why


def test_a_dry_run_says_how_the_largest_size_lies_on_one_card_and_on_eight() -> None:
    run = configure(RunConfig, "train", ["model=andrea-2b", "tokenizer=gpt2", "train.micro_batch=1"])
    lines = {line[:17].strip(): line[17:] for line in plan.describe(run).splitlines()}
    assert "sequences at a time" in lines["on 1 × 80 GB"] and "weights 9.0" in lines["on 1 × 80 GB"]
    assert lines["on 8 × 80 GB"].startswith("ddp, bf16")
    parts = plan.memory_of(run, plan.planned_vocabulary(run), 1, CPU, "bf16")
    assert lines["weights"] == f"{parts.weights / plan.GIB:.2f} GiB" and "program" in lines


@pytest.mark.untraced  # forty blocks, differentiated without memory: Python all through
def test_a_dry_run_says_where_a_model_does_not_fit() -> None:
    words = ["model=andrea-2b", "tokenizer=gpt2", "train.micro_batch=1"]
    run = configure(RunConfig, "train", words)
    run = replace(run, model=replace(run.model, n_layer=40))
    assert plan.on_cards(run, 50257, 1).startswith("does not fit")
    assert plan.on_cards(run, 50257, 8).startswith("fsdp, bf16")
