"""The time that `train.max_minutes` gives a process, and when the learning rate must begin to fall for the run to end in time.

A run with this key is planned for as many steps as its text or train.steps allows; if the time is `auto`, for those of its recipe.
At a constant rate the decay may begin at any step: rank 0 measures the steps and what follows them, and asks for the decay as
soon as the time left is what it takes. The length is then fixed. With a cosine it is fixed once, after the warm-up or the first
measured steps.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import final

from andrea.config import OptimizerConfig, RunConfig
from andrea.text.corpus import Corpus
from andrea.training.optimizer import decay_start, may_change, shortest_length
from andrea.training.planning.plan import QUARTERS, Plan
from andrea.training.progress import Progress

RESERVE = 0.02  # of the time that is left: the pace may drop a little while the learning rate falls
OVERRUN = 0.05  # of the whole time: the last evaluation may end so much later rather than leave out held-out text
LONGEST_EVALUATION = 1 / 3  # of the whole time: if the held-out text takes longer, a part of it is evaluated
FORWARD_SHARE = 1 / 3  # of a training step's time, for as many tokens
FEWEST_MEASURED = 4  # steps, the slow first one included, before the decay may begin
RECENT_STEPS = 8  # at least, of which the pace is the mean
MEASURED_SHARE = 0.05  # of the time that is left: steps are measured for so long before the decay may begin
FIRST_SHARE = 1 / 50  # of a run, in which a cosine falls by a thousandth
NOTICE = 2  # steps after which all ranks know what rank 0 asks for: on a GPU, flags are read one step later
STEPS_PER_EVALUATION = 10  # at least, in the time of an evaluation: more evaluations would take too much of the time


@final
class TimeBudget:
    """The time of one process: how much of it is left, and how long the rest of the run takes.

    minutes: train.max_minutes. started: the time at which the process began, by `clock` (in seconds).
    evaluation_steps: the time of an evaluation over the whole held-out text, in training steps, until one is measured.
    most_steps: upper limit of the run's length, even if more steps fit into the time.
    is_limit: whether the run must end in time. False if nobody set the time: it then sets the length, and no more.
    """

    def __init__(
        self,
        minutes: float,
        started: float,
        evaluation_steps: float,
        most_steps: int,
        is_limit: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.minutes, self.started, self.is_limit, self.clock = minutes, started, is_limit, clock
        self.evaluation_steps, self.most_steps = evaluation_steps, most_steps
        self.elapsed = [0.0]  # seconds after each step, without evaluations
        self.evaluation_seconds = 0.0  # of the last evaluation, with the samples and the save that follow it
        self.whole_seconds: float | None = None  # of reading the whole held-out text, as last measured
        self.is_estimated = False  # whether the length was estimated once, for the intervals
        self.lap_started = started

    def seconds_left(self) -> float:
        return 60 * self.minutes - (self.clock() - self.started)

    def evaluations(self, length: int) -> int:
        """The number of evaluations in a run of `length` steps whose train.eval_every was left `auto`."""
        return max(1, min(QUARTERS, int(length / (STEPS_PER_EVALUATION * max(self.evaluation_steps, 1e-9)))))

    def is_over(self) -> bool:
        """Whether the run must stop now: the rest of the time, and OVERRUN, is what the last evaluation takes."""
        left = self.seconds_left()
        return self.is_limit and (left + OVERRUN * 60 * self.minutes < self.last_seconds() or left < 0)

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.lap_started = self.lap_started, self.clock()
        return self.lap_started - before

    def note_step(self) -> None:
        """Count the seconds since the last call: a training step, and what followed the step before it."""
        self.elapsed.append(self.elapsed[-1] + self.lap())

    def note_evaluation(self) -> None:
        self.evaluation_seconds = self.lap()

    @property
    def step_seconds(self) -> float:
        """The mean of the newest quarter of the steps, or of RECENT_STEPS: the machine may have become busy."""
        n_step = len(self.elapsed) - 1
        first = min(n_step, max(1, min(n_step * 3 // 4, n_step - RECENT_STEPS)))  # the first step is slower
        return (self.elapsed[-1] - self.elapsed[first]) / max(1, n_step - first)

    def last_seconds(self) -> float:
        """The time of the last evaluation and of what follows it."""
        whole = self.evaluation_steps * self.step_seconds if self.whole_seconds is None else self.whole_seconds
        return max(self.evaluation_seconds, min(whole, LONGEST_EVALUATION * 60 * self.minutes))

    def readable_share(self, whole_seconds: float) -> float:
        """The share of the held-out text that an evaluation may read now. whole_seconds: of all of it, at the pace of now."""
        after = max(0.0, self.evaluation_seconds - (self.whole_seconds or 0.0))  # samples, saving
        self.whole_seconds = whole_seconds
        allowed = self.seconds_left() + OVERRUN * 60 * self.minutes - after
        allowed = max(0.0, min(allowed, LONGEST_EVALUATION * 60 * self.minutes))
        return 1.0 if whole_seconds <= allowed or not self.is_limit else allowed / whole_seconds

    def seconds(self, step: int, length: int, eval_every: int) -> float:
        """The time from `step` to the end of a run of `length` steps."""
        evaluations = (length - 1) // eval_every - step // eval_every
        evaluation = self.evaluation_seconds or self.last_seconds()
        return (length - step) * self.step_seconds + evaluations * evaluation + self.last_seconds()

    def wanted_steps(self, step: int, config: OptimizerConfig, eval_every: Callable[[int], int]) -> int:
        """The length to ask for after `step` steps: that of a run whose decay begins now, or an estimate; 0: none.

        eval_every: the length of a run -> the steps between its evaluations.
        """
        n_step = len(self.elapsed) - 1
        left = (1 - RESERVE) * self.seconds_left()
        if n_step < FEWEST_MEASURED or self.elapsed[-1] - self.elapsed[1] < MEASURED_SHARE * left:
            return 0

        def seconds(length: int) -> float:
            return self.seconds(step, length, eval_every(length))

        def begun_at(later: int) -> int:
            return min(self.most_steps, max(step + 1, shortest_length(later, self.most_steps, config)))

        if config.schedule == "cosine":
            is_asked = step + NOTICE >= config.warmup_steps
        elif seconds(begun_at(step + NOTICE + 1)) > left:
            return begun_at(step + NOTICE)
        else:
            is_asked = not self.is_estimated
        self.is_estimated |= is_asked
        return bisect_right(range(self.most_steps + 1), left, lo=step + 2, key=seconds) - 1 if is_asked else 0


def fixes_length(wanted: int, step: int, config: OptimizerConfig) -> bool:
    """Whether the length `wanted`, which rank 0 asked for, is that of the run, and no estimate; known after `step` steps."""
    return config.schedule == "cosine" or decay_start(wanted, config) <= step + NOTICE


def is_open(step: int, steps: int, config: OptimizerConfig) -> bool:
    """Whether train.max_minutes may set the length of a run planned for `steps` steps: its rate has not begun to fall."""
    return may_change(step, steps, config) or (config.schedule == "cosine" and step < FIRST_SHARE * steps)


def make_time_budget(plan: Plan, corpus: Corpus, started: float) -> TimeBudget | None:
    """None without train.max_minutes."""
    config = plan.config
    if config.max_minutes is None:
        return None
    held_out = sum(len(source.val) for source in corpus.sources)
    return TimeBudget(
        config.max_minutes,
        started,
        FORWARD_SHARE * held_out / config.tokens_per_step,
        plan.most_steps,
        is_limit="train.max_minutes" not in plan.left_auto,
    )


def describe_length(progress: Progress, config: RunConfig, budget: TimeBudget | None) -> str | None:
    """A line on a length that train.max_minutes sets, or has set in an earlier process; None for any other run."""
    steps = progress.planned_steps
    if budget is None:
        line = f"length: {steps} steps, as planned before; train.steps=N sets another length"
        return line if steps != config.steps else None
    if not is_open(progress.step, steps, config.optimizer):
        may_end = f"; train.max_minutes={budget.minutes:g} may end the run earlier" if budget.is_limit else ""
        return f"length: {steps} steps, fixed before{may_end}"
    return (
        f"length: the steps that fit into train.max_minutes={budget.minutes:g}, at most {budget.most_steps}; fixed as soon as the "
        f"learning rate begins to fall"
    )
