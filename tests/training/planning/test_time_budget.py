"""train.max_minutes: the length of a run from its time. All clocks here are counted, not real."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_words

from andrea.api.command_line import configure
from andrea.checkpoint import Checkpoint, checkpoints_of, newest_whole, read_checkpoint, result_of
from andrea.config import OptimizerConfig, RunConfig, group_config
from andrea.config.schema import DEFAULT_MINUTES
from andrea.training import start
from andrea.training.optimizer import decay_start, rate_at, relength
from andrea.training.planning.length import TimeBudget, fixes_length, is_open
from andrea.training.records.run_folder import read_lines
from andrea.training.start import make_time_budget

MUON, COSINE = group_config("optimizer", "muon"), group_config("optimizer", "muon", schedule="cosine")
QUIET = [
    "train.sample_tokens=0",
    "train.log_every=1",
    "train.keep=99",
    "precision=fp32",
]
BY_TIME = [
    "train.steps=auto", "model.recipe_steps=300",
    "train.eval_every=auto", "train.save_every=auto",
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
        def budget(plan, corpus, started: float) -> TimeBudget | None:
            made = make_time_budget(plan, corpus, started)
            return made and TimeBudget(made.minutes, 0.0, 1.0, made.most_steps, made.is_limit, clock or Ticking())

        monkeypatch.setattr(start, "make_time_budget", budget)
        given = {word.split("=")[0] for word in words}
        first = [word for word in tiny_words(tmp_path, notes, *QUIET) if word.split("=")[0] not in given]
        name = "name=b" if "name=b" in words else "name=a"
        assert script("train")(list({word.partition("=")[0]: word for word in [*first, name, *words]}.values())) == 0
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
    assert "length: the steps that fit into train.max_minutes=1, at most " in out
    assert f"length: {steps} steps, fixed now" in out and "makes all" not in out
    assert f"done at step {steps} of {steps}, the length planned for train.max_minutes=1" in out


class SlowAtFirst(Ticking):
    def __call__(self) -> float:
        self.tick = SECONDS_PER_READING * (2 if self.now < 16 else 1)
        return super().__call__()


def test_an_estimate_that_was_too_short_is_dropped(train, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Other work slows the machine at first: 60 steps are estimated to need more than the time, and then they do not."""
    words = ["train.steps=60", "train.eval_every=auto", "train.save_every=auto", "train.max_minutes=1.5"]
    checkpoint, records = train(*words, clock=SlowAtFirst())
    assert checkpoint.step == 60 and rates(records) == [rate_at(step, 60, MUON) for step in range(60)]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    steps = [tuple(map(int, re.match(r"step +(\d+)/(\d+)", line).groups())) for line in shown]
    assert any(length < 60 for _, length in steps) and steps[-1] == (60, 60)
    assert all(step <= length for step, length in steps)
    assert [record["step"] for record in records if "val/loss" in record][-2] == 60


@pytest.mark.parametrize("words", [[], ["seed=2"], ["train.steps=auto"], ["train.max_minutes=auto"]])
def test_the_default_run_has_a_time(words: list[str]) -> None:
    assert configure(RunConfig, "train", words).max_minutes == DEFAULT_MINUTES


@pytest.mark.parametrize(
    "words",
    [
        ["model=andrea-12m"],
        ["data=text", "data.path=notes"],
        ["data.path=notes"],
        ["train.steps=700"],
        ["train.max_minutes=null"],
        ["init_from=a"],
    ],
)
def test_other_runs_have_none(words: list[str]) -> None:
    assert configure(RunConfig, "train", words).max_minutes is None


def test_in_a_time_of_its_own_a_run_makes_the_steps_of_its_recipe_or_those_that_fit(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(RunConfig, "max_minutes", 1.0)
    checkpoint, records = train(*BY_TIME[2:], "train.steps=auto", "model.recipe_steps=20", "name=b")
    assert checkpoint.step == 20 and rates(records) == [rate_at(step, 20, MUON) for step in range(20)]
    checkpoint, records = train(*BY_TIME)
    steps = checkpoint.step
    assert steps < 300 and rates(records) == [rate_at(step, steps, MUON) for step in range(steps)]
    out = capsys.readouterr().out
    assert f"length: {steps} steps, fixed now" in out and "train.max_minutes=null makes all 300" in out
    assert checkpoint.state["config"]["train"]["max_minutes"] == 1.0
    first = checkpoints_of(tmp_path / "runs" / "a")[0]
    assert int(first.name[5:]) < decay_start(steps, MUON)
    monkeypatch.undo()  # a length that is typed has no time
    assert train(*BY_TIME[2:], "train.steps=40", f"resume={first}")[0].step == max(40, int(first.name[5:]) + 1)


def test_a_time_that_nobody_set_cuts_nothing_off() -> None:
    for is_limit in (True, False):
        budget = TimeBudget(1.0, 0.0, evaluation_steps=1.0, most_steps=100, is_limit=is_limit, clock=lambda: 70.0)
        assert budget.is_over() == is_limit and (budget.readable_share(60.0) < 1) == is_limit


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


@pytest.mark.slow
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
    assert read_checkpoint(path).state["planned_steps"] > 1000  # the most that the text allows: the time had fixed none
    checkpoint, _ = train(*BY_TIME, "train.max_minutes=null", f"resume={path}")
    assert checkpoint.step == 300  # model.recipe_steps
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


class Simulated:
    """A run by the clock alone, as the trainer asks the budget: no model."""

    def __init__(
        self,
        minutes: float,
        pace: Callable[[float], float],  # seconds since the beginning -> seconds of a step
        evaluation: float = 0.0,  # seconds
        begin: int = 0,
        most_steps: int = 10**6,
        config: OptimizerConfig = MUON,
        notice: int = 1,  # steps until what rank 0 asks for is read: 1 on a CPU, 2 on a GPU
    ) -> None:
        self.now, self.changes = 0.0, []
        budget = TimeBudget(minutes, 0.0, 0.8 * evaluation / pace(0.0), most_steps, clock=lambda: self.now)
        self.step, self.planned, eval_every, sent = begin, most_steps, most_steps, [0] * notice
        was_open = is_open(begin, most_steps, config)
        while self.step < self.planned and not budget.is_over():
            asks = was_open and not self.changes
            sent.append(budget.wanted_steps(self.step, config, lambda n: -(-n // budget.evaluations(n))) if asks else 0)
            self.now += pace(self.now) * (5 if self.step == begin else 1)
            self.step += 1
            budget.note_step()
            wanted = sent.pop(1)
            if wanted and not self.changes and fixes_length(wanted, self.step, config):
                self.changes.append(self.step)
                self.planned = (
                    wanted if config.schedule == "cosine" else relength(self.step, self.planned, wanted, config)
                )
            eval_every = -(-wanted // budget.evaluations(wanted)) if wanted else eval_every
            if self.step % eval_every == 0 or self.step == self.planned:
                self.now += evaluation
                budget.note_evaluation()
        self.rate = rate_at(self.step - 1, self.planned, config)


@pytest.mark.parametrize("notice", [1, 2])
@pytest.mark.parametrize("evaluation", [0.0, 3.0, 15.0])
@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.3])
@pytest.mark.parametrize("config", [MUON, COSINE, group_config("optimizer", "muon", decay_fraction=0.2)])
def test_a_run_ends_with_its_decay_and_its_last_evaluation_in_time(
    config: OptimizerConfig, seconds: float, evaluation: float, notice: int
) -> None:
    run = Simulated(2.0, lambda now: seconds, evaluation, config=config, notice=notice)
    assert run.step == run.planned and len(run.changes) == 1
    assert run.rate < 0.07 and 0.9 * 120 < run.now < 1.05 * 120


@pytest.mark.parametrize("begin", [1, 63, 64, 65, 135])
def test_a_run_that_goes_on_at_any_step_is_planned_by_its_own_clock(begin: int) -> None:
    run = Simulated(1.0, lambda now: 0.2, 2.0, begin=begin)
    assert run.step == run.planned and 50 < run.now <= 60 and len(run.changes) == 1


@pytest.mark.parametrize("busy_from", [0.0, 10.0])
def test_a_machine_that_becomes_busy_long_before_the_decay_costs_no_decay(busy_from: float) -> None:
    run = Simulated(2.0, lambda now: 0.2 if now < busy_from else 0.5, 2.0)
    assert run.step == run.planned and 100 < run.now < 1.05 * 120


def test_a_machine_that_becomes_busy_later_ends_the_run_in_time_too() -> None:
    run = Simulated(2.0, lambda now: 0.2 if now < 80 else 1.0, 2.0)
    assert run.step < run.planned and run.now <= 121


def test_the_limit_of_steps_holds_and_then_the_time_changes_nothing() -> None:
    run = Simulated(60.0, lambda now: 0.2, 2.0, most_steps=500)
    assert (run.step, run.planned, run.changes) == (500, 500, [])


def test_an_evaluation_reads_the_part_of_the_text_that_the_time_allows() -> None:
    now = 0.0
    budget = TimeBudget(1.0, 0.0, evaluation_steps=1.0, most_steps=100, clock=lambda: now)
    assert budget.readable_share(20.0) == 1.0 and budget.readable_share(40.0) == pytest.approx(0.5)  # a third of 60 s
    assert budget.last_seconds() == pytest.approx(20.0)  # as planned for
    now = 51.0
    assert budget.readable_share(12.0) == 1.0  # ends a twentieth of the time late
    assert budget.readable_share(24.0) == pytest.approx(0.5)
    now = 90.0
    assert budget.readable_share(24.0) == 0.0


def test_evaluations_do_not_take_most_of_the_time() -> None:
    budget = TimeBudget(1.0, 0.0, evaluation_steps=20.0, most_steps=10_000)
    assert [budget.evaluations(length) for length in (30, 399, 400, 799, 800, 5000)] == [1, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_a_figure_over_a_part_of_the_held_out_text_is_said_and_compared_with_none(
    train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The machine becomes slow before the last evaluation. Whatever the part's figure is, the last step is the result."""
    monkeypatch.setattr(
        TimeBudget, "readable_share", lambda budget, seconds: 0.4 if budget.seconds_left() < 12 else 1.0
    )
    checkpoint, records = train(*BY_TIME, "train.max_minutes=1", "train.patience=1")
    *earlier, last, event = [record for record in records if "val/bpb" in record]
    assert earlier and not any("val/tokens" in record for record in earlier)
    assert last["val/tokens"] == event["val/tokens"] == checkpoint.state["val_tokens"]
    assert last["step"] == checkpoint.step and last["val/tokens"] > 0
    assert checkpoint.state["compared_bpb"] is None and checkpoint.state["best_bpb"] == earlier[-1]["val/bpb"]
    assert result_of(tmp_path / "runs" / "a").path == checkpoint.path
    assert f"on {last['val/tokens']:,} held-out tokens only" in capsys.readouterr().out
