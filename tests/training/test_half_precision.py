"""fp16 with its loss scale in whole runs. A CPU stands in for the card: torch multiplies fp16 there too, slowly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea.checkpoint import newest_whole
from andrea.runtime.device import Choice
from andrea.training.optimizer import LossScale
from andrea.training.planning import plan
from andrea.training.records.run_folder import read_lines
from andrea.training.step import TrainingStep, Update

OVERFLOWS = 2.0**24  # a loss scale with which the first gradients exceed fp16's range


FEW_EXTRAS = ("train.eval_every=100", "train.sample_tokens=0")  # evaluating in fp16 takes longer than training here


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, float]]:
    """Each step of a run: whether it was finite, whether weights or optimizer changed, and the loss scale after it."""
    made, run, seen = LossScale.__init__, TrainingStep.run, []

    def begin_high(self: LossScale, device: torch.device, active: bool) -> None:
        made(self, device, active)
        self.factor.fill_(OVERFLOWS)

    def noted(self: TrainingStep, *given: Any, **how: Any) -> Update:
        kept = {**self.parallel.local_parameters, **self.optimizer.state_tensors()}
        before = {name: tensor.detach().clone() for name, tensor in kept.items()}
        update = run(self, *given, **how)
        changed = any(not torch.equal(before[name], tensor) for name, tensor in kept.items())
        seen.append((bool(update.finite), changed, float(self.scale.factor)))
        return update

    monkeypatch.setattr(plan, "choose_precision", lambda requested, device: Choice("fp16", "as on a T4"))
    monkeypatch.setattr(LossScale, "__init__", begin_high)
    monkeypatch.setattr(TrainingStep, "run", noted)
    return seen


def test_a_step_that_overflows_is_skipped_and_told_and_the_run_learns(steps, tiny_run, tmp_path: Path, capsys) -> None:
    assert tiny_run("name=a", "train.steps=30", "train.log_every=1", *FEW_EXTRAS) == 0
    skipped = [number for number, (finite, _, _) in enumerate(steps, 1) if not finite]
    assert skipped[:2] == [1, 2] and len(skipped) < 15
    assert all(finite == changed for finite, changed, _ in steps)
    assert [scale for _, _, scale in steps] == [
        OVERFLOWS / 2 ** sum(number <= n for number in skipped) for n in range(1, 31)
    ]
    said = capsys.readouterr().out
    for number in range(1, 31):
        assert (f"step {number}: fp16 overflowed: no update" in said) == (number in skipped)
    assert "fp16 (as on a T4)" in said
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # Infinity and NaN are not JSON
    records = [record for record in records if "train/loss" in record]
    assert [record["train/loss_scale"] for record in records] == [scale for _, _, scale in steps]
    assert [record["step"] for record in records if record["train/gradient_norm"] is None] == skipped
    assert records[-1]["train/loss"] < 4 < 5 < records[0]["train/loss"]


def test_a_loss_beyond_fp16_is_null_in_the_records(steps, tiny_run, tmp_path: Path, monkeypatch, capsys) -> None:
    """The forward pass overflows, and not only the gradient."""
    run = TrainingStep.run

    def overflown(self: TrainingStep, *given: Any, **how: Any) -> Update:
        update = run(self, *given, **how)
        return update if update.finite else update._replace(loss=torch.tensor(torch.inf))

    monkeypatch.setattr(TrainingStep, "run", overflown)
    assert tiny_run("name=a", "train.steps=4", "train.log_every=1", *FEW_EXTRAS) == 0
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # Infinity and NaN are not JSON
    assert [each["train/loss"] for each in records if "train/loss" in each][:2] == [None, None]
    assert "step 1/4" in capsys.readouterr().out


def test_a_resumed_run_has_the_loss_scale_of_an_uninterrupted_one(
    steps, tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between two steps that overflow."""
    assert tiny_run("name=whole", *FEW_EXTRAS) == 0
    run = TrainingStep.run

    def interrupted(self: TrainingStep, *given: Any, **how: Any) -> Update:
        if len(steps) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, *given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "run", interrupted)
        assert tiny_run("name=parts", *FEW_EXTRAS) == 143
    saved = newest_whole(tmp_path / "runs" / "parts").state["loss_scale"]
    assert tiny_run("name=parts", "resume=auto") == 0
    assert steps[:12] == steps[12:] and {True, False} == {finite for finite, _, _ in steps}
    assert saved == [OVERFLOWS / 2, 0.0] and not steps[1][0]
    whole, parts = (newest_whole(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert whole.state["loss_scale"] == parts.state["loss_scale"]
    for one, other in (
        (whole.model_tensors(), parts.model_tensors()),
        (whole.optimizer_tensors(), parts.optimizer_tensors()),
    ):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    scales = [
        [
            record["train/loss_scale"]
            for record in read_lines(tmp_path / "runs" / name / "metrics.jsonl")
            if "train/loss" in record
        ]
        for name in ("whole", "parts")
    ]
    assert scales[0] == scales[1] and len(set(scales[0])) > 1
