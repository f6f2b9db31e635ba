"""The time that `train.max_minutes` gives a process, and how many steps fit into it.

A run with this key gets its length from the time: a first guess, then rank 0's estimates from the measured pace, until the
learning rate begins to fall (see `optimizer/schedule.py`).
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_right
from collections.abc import Callable, Collection
from pathlib import Path
from typing import final

from andrea.config import OptimizerConfig, RunConfig, TrainConfig
from andrea.model.size import flops_per_token
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import choose_device, choose_precision
from andrea.text.corpus import Corpus
from andrea.training.optimizer.schedule import decay_start, may_change
from andrea.training.planning.pace.measured_pace import Mode, measured_pace
from andrea.training.planning.small_text import is_length_auto, most_steps_for_text
from andrea.training.progress import Progress

RESERVE = 0.02  # of the time that is left: the pace may drop a little while the learning rate falls
FORWARD_SHARE = 1 / 3  # of a training step's time, for as many tokens
PACE_STEPS = 10  # after the warm-up: a first guess leaves at least so many steps to measure the pace
FEWEST_MEASURED = 4  # steps, from which the length is estimated
STEPS_PER_EVALUATION = 10  # at least, in the time of an evaluation: more evaluations would take too much of the time
QUARTERS = 4  # evaluations and checkpoints of a run, if the time allows them
MOST_STEPS = 2**40


@final
class TimeBudget:
    """The time of one process: how much of it is left, and how many steps fit into it.

    minutes: train.max_minutes. started: the time at which the process began, by `clock` (in seconds).
    evaluation_steps: the time of an evaluation over the whole held-out text, in training steps, until one is measured.
    most_steps: upper limit of the run's length, even if more steps fit into the time.
    """

    def __init__(
        self,
        minutes: float,
        started: float,
        evaluation_steps: float,
        most_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.minutes, self.started, self.clock = minutes, started, clock
        self.evaluation_steps, self.most_steps = evaluation_steps, most_steps
        self.first_step_seconds = self.step_seconds = 0.0  # the first step, which is slower; all later ones
        self.n_step = 0
        self.pauses: dict[str, float] = {}  # what follows a step -> seconds that it took the last time
        self.lap_started = started

    def seconds_left(self) -> float:
        return 60 * self.minutes - (self.clock() - self.started)

    def evaluations(self, length: int) -> int:
        """The number of evaluations in a run of `length` steps whose train.eval_every was left `auto`."""
        return max(1, min(QUARTERS, int(length / (STEPS_PER_EVALUATION * max(self.evaluation_steps, 1e-9)))))

    def is_over(self) -> bool:
        return self.seconds_left() < 0

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.lap_started = self.lap_started, self.clock()
        return self.lap_started - before

    def note_step(self) -> None:
        """Record the time of a training step: the seconds since the last call of `lap`, `note_step` or `note_pause`."""
        if self.n_step == 0:
            self.first_step_seconds = self.lap()
        else:
            self.step_seconds += self.lap()
        self.n_step += 1

    def note_pause(self, pause: str | None) -> None:
        """Record the time of the work after a step. pause: evaluation, save, sample or heads; None: count it as step time."""
        if pause:
            self.pauses[pause] = self.lap()
        elif self.n_step > 1:
            self.step_seconds += self.lap()

    def fitting_steps(self, step: int, settled: Callable[[int], TrainConfig]) -> int:
        """The length of a run that has done `step` steps and ends in time, from `step` to `most_steps`.

        settled: the length of a run -> the `train` group with the intervals for this length.
        """
        assert self.n_step, "no step has been measured"
        each = self.step_seconds / (self.n_step - 1) if self.n_step > 1 else self.first_step_seconds
        evaluation = self.pauses.get("evaluation", self.evaluation_steps * each)
        last = max(evaluation, self.evaluation_steps * each)  # over the whole held-out text

        def seconds(length: int) -> float:
            train = settled(length)
            pauses = {
                "save": train.save_every, "sample": train.sample_every, "heads": train.attention_every
            }  # fmt: skip
            due = sum(self.pauses.get(name, 0.0) * (length // every - step // every) for name, every in pauses.items())
            evaluations = (length - 1) // train.eval_every - step // train.eval_every
            return (length - step) * each + evaluations * evaluation + last + due

        left = (1 - RESERVE) * self.seconds_left()
        most = max(step, int(min(self.most_steps, step + max(0.0, left) / max(each, 1e-9))))
        return bisect_right(range(most + 1), left, lo=step + 1, key=seconds) - 1


def is_estimated(step: int, steps: int, n_measured: int, config: OptimizerConfig) -> bool:
    """Whether to estimate the length again after `step` steps: at each power of two, and just before the decay begins.

    The estimates are rare, because each may change the intervals that are shares of the run. n_measured: number of steps
    that this process has measured; its first steps are slower than the others.
    """
    about_to_decay = step + 2 >= decay_start(steps, config)  # on a GPU, ranks know the estimate two steps later
    is_time = step & (step - 1) == 0 and n_measured >= FEWEST_MEASURED
    return n_measured > 0 and may_change(step, steps, config) and (about_to_decay or is_time)


def first_guess(config: RunConfig, n_vocab: int) -> int:
    """Steps in train.max_minutes at the pace of an earlier run on this machine; without such a run, the model's recipe."""
    assert config.train.max_minutes is not None
    per_token, device = flops_per_token(config.model, config.attention, n_vocab), choose_device(config.device)
    step_flops = per_token * config.tokens_per_step
    compile_ = choose_compile(config.compile, device, config.steps * step_flops).value
    mode = Mode(device.type, choose_precision(config.precision, device).value, compile_)
    pace = measured_pace(Path(config.runs_dir), mode, per_token)
    steps = 60 * config.train.max_minutes * pace.flops_per_second / step_flops if pace else config.steps
    return int(min(max(steps, config.optimizer.warmup_steps + PACE_STEPS), MOST_STEPS))


def with_first_guess(config: RunConfig, corpus: Corpus) -> RunConfig:
    """The configuration with a number for train.steps=auto, if train.max_minutes is set."""
    if config.train.max_minutes is None or config.train.steps != "auto":
        return config
    steps = min(first_guess(config, corpus.tokenizer.n_vocab), most_steps_for_text(config, corpus))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def make_time_budget(
    config: RunConfig, left_auto: Collection[str], corpus: Corpus, started: float
) -> TimeBudget | None:
    """None without train.max_minutes."""
    if config.train.max_minutes is None:
        return None
    held_out = sum(len(source.val) for source in corpus.sources)
    most_steps = most_steps_for_text(config, corpus) if is_length_auto(config, left_auto) else config.steps
    return TimeBudget(config.train.max_minutes, started, FORWARD_SHARE * held_out / config.tokens_per_step, most_steps)


def describe_length(progress: Progress, config: RunConfig, budget: TimeBudget | None) -> str | None:
    """A line on a length that train.max_minutes sets, or has set in an earlier process; None for any other run."""
    steps = progress.planned_steps
    if budget is None:
        kept = steps != config.steps
        return f"length: {steps} steps, as planned before; train.steps=N sets another length" if kept else None
    if not may_change(progress.step, steps, config.optimizer):
        return (
            f"length: {steps} steps, fixed because the learning rate has begun to fall; train.max_minutes={budget.minutes:g} may "
            f"end the run earlier"
        )
    return (
        f"length: about {steps} steps in train.max_minutes={budget.minutes:g}, at most {budget.most_steps}; corrected from "
        f"measured times until the learning rate begins to fall"
    )
