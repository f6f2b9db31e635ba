"""Distillation: the loss, its gradient, and runs that learn from other runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planned_memory import plan_memory
from torch.nn.functional import one_hot

from andrea.checkpoint import newest_whole
from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.model import GPT, initialise
from andrea.text.shards import IGNORED_TARGET
from andrea.training.loss.loss import MicroBatchLoss
from andrea.training.parallel.ranks import Parallel
from andrea.training.records.run_folder import read_lines

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    name="tiny", d_model=16, n_layer=2, n_head=2, d_mlp=24, sequence_length=8, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=True, qk_norm=True, logit_softcap=15.0,
    recipe_steps=1, recipe_tokens_per_step=8,
)  # fmt: skip
ATTENTION = AttentionConfig(compatibility="scaled_dot", implementation="auto")
QUICK = (
    "train.steps=6",
    "train.eval_every=6",
    "train.save_every=3",
    "train.log_every=1",
    "precision=fp32",
    "compile=off",
)


def model_of(seed: int) -> GPT:
    model = GPT(CONFIG, ATTENTION, n_vocab=11)
    initialise(model, torch.Generator().manual_seed(seed))
    return model


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[1, 2:5], targets[2] = IGNORED_TARGET, IGNORED_TARGET
    return tokens, targets


def test_the_gradient_is_that_of_mixed_targets_and_the_number_that_of_the_text(rows) -> None:
    (tokens, targets), student = rows, model_of(1)
    teachers = [model_of(2).requires_grad_(False), model_of(3).requires_grad_(False)]
    probabilities = sum(model.logits(model(tokens)).softmax(-1) for model in teachers) / 2
    kept = targets != IGNORED_TARGET
    mixed = 0.5 * one_hot(targets.clamp(min=0), 11) + 0.5 * probabilities
    log_probabilities = student.logits(student(tokens)).log_softmax(-1)
    expected = torch.autograd.grad(-(mixed * log_probabilities)[kept].sum(), list(student.parameters()))
    loss = MicroBatchLoss(student, CPU, "fp32", observing=False, recompute=False, teachers=teachers)
    nats, _ = loss(tokens, targets)
    torch.testing.assert_close(torch.autograd.grad(nats, list(student.parameters())), expected)
    of_text = -log_probabilities.gather(-1, targets.clamp(min=0)[..., None])[..., 0][kept].sum()
    torch.testing.assert_close(nats, of_text)
    with torch.no_grad():
        torch.testing.assert_close(loss(tokens, targets)[0], of_text)


@pytest.mark.parametrize("compile_mode", [pytest.param("on", marks=[pytest.mark.slow, pytest.mark.long]), "blocks"])
def test_compiled_it_is_the_same(compile_mode: str, rows) -> None:
    tokens, targets = rows
    losses = []
    for mode in ("off", compile_mode):
        student, teachers = model_of(1), [model_of(2).requires_grad_(False)]
        loss = Parallel(student).wrap(MicroBatchLoss(student, CPU, "fp32", False, False, teachers), mode)
        loss(tokens, targets)[0].backward()
        losses.append([parameter.grad for parameter in student.parameters()])
    torch.testing.assert_close(losses[1], losses[0])


def test_a_run_learns_from_two_runs_and_resumes_exactly(tiny_run, tmp_path: Path, capsys) -> None:
    for seed in (1, 2):
        assert tiny_run(f"name=teacher-{seed}", f"seed={seed}", *QUICK) == 0
    taught = ("train.teachers=teacher-1", "train.teachers=teacher-2")
    assert tiny_run("name=whole", *QUICK, *taught) == 0
    assert "distillation: half of each target from the mean of 2 teachers" in capsys.readouterr().out
    runs = tmp_path / "runs"
    once = newest_whole(runs / "whole").state
    teachers = once["config"]["train"]["teachers"]
    assert teachers == [str(newest_whole(runs / f"teacher-{seed}").path) for seed in (1, 2)]
    halfway = runs / "whole" / "checkpoints" / "step-00000003"
    assert tiny_run(f"resume={halfway}", "name=whole", *QUICK) == 0
    assert newest_whole(runs / "whole").state["val_loss"] == once["val_loss"]
    assert tiny_run("name=alone", *QUICK) == 0
    assert newest_whole(runs / "alone").state["val_loss"] != once["val_loss"]
    first = [read_lines(runs / name / "metrics.jsonl") for name in ("whole", "alone")]
    shown = [next(row["train/loss"] for row in rows if "train/loss" in row) for rows in first]
    assert shown[0] == pytest.approx(shown[1], rel=1e-6)  # before the first update: the loss of the text in both


def test_teachers_that_do_not_fit_are_refused(tiny_run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train.teachers=nobody"):
        tiny_run("train.teachers=nobody")
    tiny_run("name=short", *QUICK, "model.sequence_length=16")
    with pytest.raises(UserError, match="was trained on 16 tokens at once, but this run reads 32; set model.sequence"):
        tiny_run("name=long", *QUICK, "train.teachers=short")
    tiny_run("name=bytes", *QUICK, "tokenizer=byte")
    with pytest.raises(UserError, match="was trained with the tokenizer .*; tokenizer.path=.* takes the teacher's"):
        tiny_run("name=words", *QUICK, "tokenizer=bpe", "tokenizer.vocab_size=300", "train.teachers=bytes")


def test_the_memory_plan_counts_teachers() -> None:
    how = {"micro_batch": 2, "precision": "fp32", "optimizer": "adamw"}
    alone, taught = (plan_memory(CONFIG, ATTENTION, 11, **how, n_teacher=n) for n in (0, 2))
    assert taught.weights == 3 * alone.weights
    sharded, by_ranks = (plan_memory(CONFIG, ATTENTION, 11, **how, n_teacher=n, ranks=4, sharded=True) for n in (0, 2))
    assert by_ranks.weights == sharded.weights + 2 * alone.weights
    assert taught.activations == alone.activations + 5 * 4 * 2 * 8 * 11
