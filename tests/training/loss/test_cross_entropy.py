"""The loss as a sum over targets, bits per byte by hand, and the bytes that an evaluation counts."""

from __future__ import annotations

import math

import pytest
import torch

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.model import GPT, initialise
from andrea.text.shards import IGNORED_TARGET
from andrea.training.evaluation import summary, sums_over
from andrea.training.loss.loss import loss_sum_from_hidden


def tiny_model() -> GPT:
    words = ["model.d_model=24", "model.n_layer=1", "model.n_head=3", "model.d_mlp=40", "model.sequence_length=11"]
    run = configure(RunConfig, "train", [*words, "train.tokens_per_step=11"])
    model = GPT(run.model, run.attention, 29)
    initialise(model, torch.Generator().manual_seed(1))
    return model


def test_the_loss_is_the_sum_of_log_probabilities_without_ignored_targets() -> None:
    model = tiny_model()
    tokens = torch.randint(29, (3, 11), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1, 1).clone()
    targets[:, -1] = IGNORED_TARGET
    log_probabilities = model.logits(model(tokens)).double().log_softmax(-1)
    by_hand = -sum(log_probabilities[b, t, targets[b, t]] for b in range(3) for t in range(10))
    assert loss_sum_from_hidden(model, model(tokens), targets).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_activation_checkpointing_reaches_the_blocks() -> None:
    model, tokens = tiny_model(), torch.randint(29, (3, 11), generator=torch.Generator().manual_seed(2))
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: calls.append(1))
    losses = [loss_sum_from_hidden(model, model(tokens, recompute=recompute), tokens) for recompute in (False, True)]
    assert torch.equal(*losses) and len(calls) == 2
    losses[1].backward()
    assert len(calls) == 3  # the backward pass computes the block again


def test_an_untrained_model_with_a_zero_head_scores_ln_v_on_every_token() -> None:
    run = configure(RunConfig, "train", ["model.tied_head=false"])
    model = GPT(run.model, run.attention, 31)
    initialise(model, torch.Generator().manual_seed(1))
    model.head.weight.data.zero_()
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    assert loss_sum_from_hidden(model, model(tokens), tokens).item() == pytest.approx(14 * math.log(31), rel=1e-5)


def test_bits_per_byte_by_hand() -> None:
    figures = summary(nats=8 * math.log(2), tokens=4, bytes_=2)
    assert figures["bpb"] == pytest.approx(4.0) and figures["loss"] == pytest.approx(2 * math.log(2))
    assert summary(0.0, 0, 0) == {"loss": 0.0, "bpb": 0.0, "nats": 0.0, "tokens": 0, "bytes": 0}


def test_evaluation_counts_bytes_of_targets() -> None:
    bytes_of_token = torch.tensor([0, 1, 2, 5])  # token 0 is end-of-text
    targets = torch.tensor([[1, 2, 0, IGNORED_TARGET]])
    batches = [(targets.clamp(min=0), targets)] * 3

    def one_nat_each(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (targets != IGNORED_TARGET).sum().float()

    assert sums_over(batches, one_nat_each, bytes_of_token, torch.device("cpu")) == (9.0, 9, 9)
