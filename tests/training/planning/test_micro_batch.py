"""The largest micro-batch that fits: tried from above, memory freed between tries."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from andrea.api.command_line import configure
from andrea.config import RunConfig, UserError
from andrea.model.gpt import GPT
from andrea.training.loss.loss import MicroBatchLoss
from andrea.training.parallel.ranks import Parallel
from andrea.training.planning import memory
from andrea.training.planning.memory import Machine, largest_that_fits, with_tried_micro_batch
from andrea.training.records.console import Console
from andrea.training.start import micro_batch_loss


class Card:
    """Runs out of memory above so many sequences, in the middle of its work, as a card does."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tried: list[int] = []
        self.held: weakref.ref[torch.Tensor] | None = None

    def try_one(self, n_sequence: int) -> None:
        assert self.held is None or self.held() is None, "what the last try held is still there"
        self.tried.append(n_sequence)
        activations = torch.zeros(n_sequence, 5)
        self.held = weakref.ref(activations)
        if n_sequence > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_the_first_that_fits_is_taken_and_nothing_is_held_between_tries() -> None:
    card = Card(capacity=5)
    assert largest_that_fits(card.try_one, [12, 6, 4, 3, 1]) == 4
    assert card.tried == [12, 6, 4]


def test_where_nothing_fits_the_keys_to_turn_are_named() -> None:
    card = Card(capacity=0)
    with pytest.raises(UserError, match="activation_checkpointing=true.*smaller model.*parallel=fsdp"):
        largest_that_fits(card.try_one, [3, 1])
    assert card.tried == [3, 1]


def test_any_other_error_is_a_bug_and_is_let_through() -> None:
    def broken(n_sequence: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_that_fits(broken, [2, 1])


def test_start_takes_what_fits_and_leaves_no_gradients(capsys) -> None:
    """As on a card, where more than three sequences at a time run out of memory."""
    run = configure(RunConfig, "train", [
        "model.d_model=16", "model.n_layer=1", "model.n_head=2", "model.d_mlp=32", "model.sequence_length=8",
        "train.tokens_per_step=96", "train.micro_batch=12", "tokenizer=byte", "precision=fp32",
    ])  # fmt: skip
    parallel, tried = Parallel(GPT(run.model, run.attention, 257)), []
    forward = MicroBatchLoss.forward

    def of_a_small_card(self, tokens, targets):
        tried.append(len(tokens))
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("as a card with too little memory says")
        return forward(self, tokens, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroBatchLoss, "forward", of_a_small_card)
        machine = Machine(torch.device("cpu"), parallel.ranks, 1e12)
        loss = micro_batch_loss(parallel.model, run, machine.device)
        found = with_tried_micro_batch(run, parallel, machine, Console(1), loss)
    assert tried == [12, 6, 4, 3] and found.train.micro_batch == 3
    assert all(parameter.grad is None for parameter in parallel.model.parameters())
    assert "3 sequences" in capsys.readouterr().out


def test_a_model_that_does_not_fit_into_the_memory_of_a_cpu_is_refused_before_it_is_built(
    tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux would kill the run without a word. Someone who knows better names the micro-batch."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 0)
    monkeypatch.setattr(memory, "held_bytes", lambda: 2**28)
    with pytest.raises(UserError, match=r"needs \d+ MiB with one sequence .* 256 MiB here; .*train\.micro_batch=1"):
        tiny_run("name=refused")
    assert not list(tmp_path.glob("runs/refused"))
    assert tiny_run("name=tried", "train.micro_batch=1", "train.steps=1") == 0
