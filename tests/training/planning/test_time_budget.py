"""train.max_minutes: the length of a run from its time. All clocks here are counted, not real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_words

from andrea.checkpoint import Checkpoint, checkpoints_of, newest_whole, read_checkpoint
from andrea.cli.command_line import configure
from andrea.config import RunConfig, group_config
from andrea.training import start
from andrea.training.optimizer.schedule import decay_start, rate_at
from andrea.training.planning.pace.time_budget import TimeBudget, first_guess, is_estimated, make_time_budget
from andrea.training.records.run_folder import read_lines

MUON = group_config("optimizer", "muon")
QUIET = [
    "train.sample_tokens=0",
    "train.lens_prompt=",
    "train.log_every=1",
    "train.keep=99",
    "precision=fp32",
    "health.samples=0",
]
BY_TIME = [
    "train.steps=auto", "model.recipe_steps=300",
    "train.eval_every=auto", "train.save_every=auto", "train.attention_every=1000",
]  # fmt: skip
SECONDS_PER_READING = 0.25


class Ticking:
    """A clock that goes on by a fixed time whenever it is read."""

    def __init__(self) -> None:
        self.now, self.tick = 0.0, SECONDS_PER_READING

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def train(
    tmp_path: Path, notes: Path, script, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Checkpoint, list[dict]]]:
    """Trains the tiny model by a ticking clock. Returns the newest checkpoint and the records."""

    def trained(*words: str, clock: Ticking | None = None) -> tuple[Checkpoint, list[dict]]:
        def budget(config, left_auto, corpus, started: float) -> TimeBudget | None:
            made = make_time_budget(config, left_auto, corpus, started)
            return made and TimeBudget(made.minutes, 0.0, 1.0, made.most_steps, clock=clock or Ticking())

        monkeypatch.setattr(start, "make_time_budget", budget)
        given = {word.split("=")[0] for word in words}
        first = [word for word in tiny_words(tmp_path, notes, *QUIET) if word.split("=")[0] not in given]
        name = "name=b" if "name=b" in words else "name=a"
        assert script("train")([*first, name, *words]) == 0
        run = tmp_path / "runs" / name[5:]
        return newest_whole(run), read_lines(run / "metrics.jsonl")

    return trained


def rates(records: list[dict]) -> list[float]:
    return [record["train/rate"] for record in records if "train/rate" in record]


def test_the_decay_ends_with_the_time(train, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """More steps than the first guess, all at the rates of a run that had the final length from its beginning."""
    clock = Ticking()
    checkpoint, records = train(
        *BY_TIME[2:], "train.steps=auto", "model.recipe_steps=20", "train.max_minutes=1", clock=clock
    )
    steps = checkpoint.step
    assert steps > 30 and checkpoint.state["planned_steps"] == steps and records[-1]["event"] == "done"
    assert rates(records) == [rate_at(step, steps, MUON) for step in range(steps)]
    assert 0.8 * 60 < clock.now < 1.1 * 60
    evaluated = [record["step"] for record in records if "val/loss" in record]
    assert (
        len(evaluated) in (5, 6) and evaluated[-2] == steps
    )  # quarters of the run; the last one twice, as an event too
    out = capsys.readouterr().out
    assert "length: about 20 steps in train.max_minutes=1, at most " in out
    assert f"length: {steps} steps, fixed now" in out and "left of train.max_minutes" in out
    assert f"done at step {steps} of {steps}, the length planned for train.max_minutes=1" in out


def test_the_earlier_of_time_and_steps_ends_the_run(train) -> None:
    limited = ["train.steps=30", *BY_TIME[2:]]
    assert train(*limited, "train.max_minutes=1", "name=b")[0].step == 30
    checkpoint, records = train(*limited, "train.max_minutes=0.45")
    assert 10 < checkpoint.step < 30 and records[-1]["event"] == "done"
    assert rates(records)[-1] < 0.2 and checkpoint.state["config"]["train"]["steps"] == 30


def test_after_the_decay_has_begun_a_resumed_run_is_the_uninterrupted_one(train, tmp_path: Path) -> None:
    checkpoint, records = train(*BY_TIME, "train.max_minutes=1")
    weights, steps = checkpoint.model_tensors(), checkpoint.step
    earlier = [int(path.name[5:]) for path in checkpoints_of(tmp_path / "runs" / "a")]
    middle = next(step for step in earlier if decay_start(steps, MUON) < step < steps)
    path = tmp_path / "runs" / "a" / "checkpoints" / f"step-{middle:08d}"
    for more in ("train.max_minutes=7", "train.max_minutes=null"):
        again, records_again = train(*BY_TIME, more, f"resume={path}")
        assert rates(records_again) == rates(records) and again.step == steps
        assert [record["step"] for record in records_again] == [record["step"] for record in records]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in again.model_tensors().items())


def test_before_the_decay_a_resumed_run_is_planned_anew(train, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    steps = train(*BY_TIME, "train.max_minutes=1")[0].step
    path = checkpoints_of(tmp_path / "runs" / "a")[0]
    first = int(path.name[5:])
    assert 0 < first < decay_start(steps, MUON)
    checkpoint, records = train(*BY_TIME, "train.max_minutes=2", f"resume={path}")
    assert checkpoint.step > 1.4 * steps and records[-1]["event"] == "done"
    assert rates(records) == [rate_at(step, checkpoint.step, MUON) for step in range(checkpoint.step)]
    capsys.readouterr()
    path = checkpoints_of(tmp_path / "runs" / "a")[0]
    planned = read_checkpoint(path).state["planned_steps"]  # without a time, the length stays
    checkpoint, _ = train(*BY_TIME, "train.max_minutes=null", f"resume={path}")
    assert checkpoint.step == planned
    assert f"length: {planned} steps, as planned before; train.steps=N sets another length" in capsys.readouterr().out
    another = int(path.name[5:]) + 3
    assert train(f"train.steps={another}", "train.max_minutes=null", f"resume={path}")[0].step == another


def test_time_is_a_hard_limit_too(train, capsys: pytest.CaptureFixture) -> None:
    """The pace drops after the length was fixed: the run stops before its last step."""

    class Slowing(Ticking):
        def __call__(self) -> float:
            self.tick = SECONDS_PER_READING if self.now < 45 else 4.0
            return super().__call__()

    checkpoint, records = train(*BY_TIME, "train.max_minutes=1", clock=Slowing())
    steps = checkpoint.state["planned_steps"]
    assert records[-1]["event"] == "stopped" and checkpoint.step < steps
    assert f"stopped at step {checkpoint.step} of {steps}, at the end of train.max_minutes=1" in capsys.readouterr().out


def test_an_estimate_counts_the_pauses_that_are_left() -> None:
    clock = Ticking()
    budget = TimeBudget(1.0, 0.0, evaluation_steps=2.0, most_steps=1000, clock=clock)
    words = ["train.eval_every=10", "train.save_every=100", "train.sample_every=100", "train.attention_every=5"]
    train = configure(RunConfig, "train", words).train
    for seconds, pause in ((9.0, None), (0.5, None), (0.5, "heads"), (0.5, "evaluation")):
        clock.tick = seconds
        budget.note_step()
        clock.tick = {"heads": 0.25, "evaluation": 2.0}.get(pause or "", 0.0)
        budget.note_pause(pause)
    clock.tick = 0.0
    left = budget.seconds_left()  # of 60 seconds: 10.5 of steps and 2.25 of pauses are over
    assert left == pytest.approx(60 - 12.75)
    length = budget.fitting_steps(4, lambda steps: train)

    def seconds(length: int) -> float:
        return 0.5 * (length - 4) + 0.25 * (length // 5) + 2.0 * ((length - 1) // 10) + 2.0

    assert seconds(length) <= 0.98 * left < seconds(length + 1)


def test_without_time_left_no_step_fits_and_one_step_is_enough_to_estimate() -> None:
    clock = Ticking()
    budget = TimeBudget(1.0, 0.0, evaluation_steps=0.0, most_steps=1000, clock=clock)
    clock.tick = 2.0
    budget.note_step()
    words = [f"train.{name}_every=1000" for name in ("eval", "save", "sample", "attention")]
    train = configure(RunConfig, "train", words).train
    clock.tick = 0.0
    assert budget.fitting_steps(1, lambda steps: train) == 1 + int(0.98 * 58 / 2)
    clock.now = 100.0
    assert budget.fitting_steps(7, lambda steps: train) == 7 and budget.is_over()


def test_the_length_is_estimated_seldom_and_just_before_the_decay() -> None:
    asked = [step for step in range(100) if is_estimated(step, 100, step, MUON)]
    assert asked == [4, 8, 16, 32, 38, 39, 40]
    assert [is_estimated(39, 100, n_measured, MUON) for n_measured in (0, 1)] == [False, True]


def test_evaluations_do_not_take_most_of_the_time() -> None:
    budget = TimeBudget(1.0, 0.0, evaluation_steps=20.0, most_steps=10_000)
    assert [budget.evaluations(length) for length in (30, 399, 400, 799, 800, 5000)] == [1, 1, 2, 3, 4, 4]


def test_the_first_guess_is_the_pace_of_an_earlier_run(train, tmp_path: Path, notes: Path) -> None:
    words = [*tiny_words(tmp_path, notes, *QUIET), *BY_TIME, "precision=fp32", "device=cpu", "train.max_minutes=3"]
    asked = configure(RunConfig, "train", words)
    assert first_guess(asked, 257) == 300
    _, records = train("device=cpu")
    paced = [record for record in records if "train/tokens_per_second" in record]
    for place, record in enumerate(paced):  # known speeds: all are 20 steps a second, but for a slow first record
        record["train/tokens_per_second"] = 20.0 * asked.tokens_per_step if place else 1.0
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text(lines, encoding="utf-8")
    assert first_guess(asked, 257) == pytest.approx(180 * 20, abs=1)
