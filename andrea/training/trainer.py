"""The training loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from andrea.checkpoint import is_best_so_far
from andrea.config import RunConfig
from andrea.runtime import host_copy
from andrea.runtime.shared_cores import sharing_cores
from andrea.text.shards import DataLost
from andrea.training.checkpoints import RunCheckpoints
from andrea.training.endings import Endings
from andrea.training.evaluation import Evaluator
from andrea.training.heads import scalars
from andrea.training.optimizer.schedule import rate_at, relength
from andrea.training.planning.settle import as_planned
from andrea.training.planning.time_budget import fixes_length, is_open
from andrea.training.progress import Progress
from andrea.training.records.records import Records
from andrea.training.records.run_folder import write_config
from andrea.training.step import TrainingStep, Update
from andrea.training.stop_requests import StopRequests
from andrea.training.throughput import Throughput

NOTICED_RISE = 0.01  # of the validation figure, relative to its best: less may be chance


MEASUREMENTS = 20  # of the attention heads in a run: enough for a curve of each head
MOST_BETWEEN = 6  # of them between two evaluations: a run that is evaluated rarely is measured rarely too


class Due(NamedTuple):
    """Which actions follow a step."""

    record: bool
    evaluation: bool
    heads: bool
    save: bool


@dataclass
class Trainer:
    """Trains to the last step, the time limit, a signal or a failure; `train` returns the process's exit code."""

    config: RunConfig
    left_auto: list[str]  # see RunSetup
    step: TrainingStep
    progress: Progress
    evaluator: Evaluator
    checkpoints: RunCheckpoints
    records: Records
    stopping: StopRequests
    throughput: Throughput
    is_planned_for_text: bool = False  # whether the length was chosen for a small text

    def __post_init__(self) -> None:
        self.unread: list[tuple[int, host_copy.HostCopy]] = []  # steps whose `Update.numbers` the host has not read yet
        self.figures: dict[str, float] = {}  # of the last step that was read
        self.planned = self.config_for(self.progress.planned_steps)
        budget, optimizer = self.stopping.budget, self.config.optimizer
        self.is_open = budget is not None and is_open(self.progress.step, self.progress.planned_steps, optimizer)
        if budget and self.is_open:  # as long as it may be: train.max_minutes lets the rate fall earlier
            self.progress.planned_steps = budget.most_steps
        self.endings = Endings(
            self.config,
            self.progress,
            self.evaluator,
            self.checkpoints,
            self.records,
            self.stopping,
            self.is_planned_for_text,
        )

    def train(self) -> int:
        is_alone = self.step.device.type == "cpu" and self.step.ranks.size == 1  # ranks also wait for each other
        with self.stopping.signals_caught(), self.records.console.live_line(), sharing_cores(is_alone):
            try:
                return self.train_steps()
            except DataLost:  # the weights are intact; with several ranks, the others are in the middle of a step
                if self.progress.step and self.step.ranks.size == 1 and self.read_figures(wait=True):
                    self.checkpoints.save_if_finite()
                raise

    def train_steps(self) -> int:
        config, progress = self.config, self.progress
        if progress.step and self.due_after(progress.step).evaluation:  # the run may have been killed after the save
            self.evaluator.make_up()
        if self.stopping.budget:
            self.stopping.budget.lap()
        while progress.step < progress.planned_steps and not self.stopping.agreed:
            clock = time.perf_counter()
            self.records.watchdog.at(progress.step + 1, "training step")
            due = self.due_after(progress.step + 1)
            rate = rate_at(progress.step, progress.planned_steps, config.optimizer)
            batch = self.step.batch(progress.step)
            update = self.step.run(batch, rate, self.requests, measure_size=due.evaluation)
            progress.step += 1
            progress.tokens += config.tokens_per_step
            progress.flops += config.tokens_per_step * self.throughput.flops_per_token
            self.unread.append((progress.step, host_copy.HostCopy(update.numbers)))
            self.step.prefetch(progress.step)
            if not self.read_figures(wait=due.record or due.evaluation or due.save):
                return self.endings.stop_not_finite(self.figures)
            if (due.evaluation or due.save) and not self.checkpoints.is_finite():
                return self.endings.stop_not_finite(self.figures)
            self.checkpoints.check()
            self.note_time(time.perf_counter() - clock, rate)
            if (wanted := self.stopping.take_wanted_steps()) and self.is_open:
                self.heed_time(wanted)
            self.follow_up(due, update, rate)
            if due.evaluation and (failed := self.evaluator.failed()):
                return self.endings.stop_failed(failed)
        if not self.read_figures(wait=True) or not (self.checkpoints.is_saved() or self.checkpoints.is_finite()):
            return self.endings.stop_not_finite(self.figures)
        return self.endings.conclude()

    def follow_up(self, due: Due, update: Update, rate: float) -> None:
        """Do the work that is due after a step. Its time is not counted as training time."""
        if due.heads:
            self.records.log(self.evaluator.measure_heads())
        if due.record or due.evaluation:
            figures = self.training_figures(update, rate)
            self.records.log(figures | (self.evaluator.evaluate(update.size_ratios) if due.evaluation else {}))
        if due.evaluation and self.is_planned_for_text:
            self.decay_if_worse()
        if due.evaluation:
            self.heed_patience()
        if due.save:  # before the extras: none of them can cost the checkpoint
            self.checkpoints.save()
        if due.evaluation:
            self.evaluator.draw_attention()
            self.evaluator.show_sample()
        self.evaluator.forget()
        if self.stopping.budget and due.evaluation:
            self.stopping.budget.note_evaluation()

    def read_figures(self, wait: bool) -> bool:
        """Read loss, gradient norm and flags of completed steps. Returns False if a step was not finite.

        Without `wait`, the newest step on a GPU is left unread: the host then queues one step while the GPU computes
        another. An fp16 step that only overflowed its loss scale is not a failure: the scale was halved and training goes on.
        """
        leave_newest = host_copy.runs_ahead(self.step.device) and not wait
        while len(self.unread) > int(leave_newest):
            number, numbers = self.unread.pop(0)
            loss, norm, finite, *stop_flags = numbers.read()
            self.figures = {"step": number, "loss": loss, "norm": norm}
            self.stopping.agree(stop_flags)
            if finite:
                self.evaluator.health.note_step(number, self.figures["loss"], self.figures["norm"])
            elif not self.step.scale.may_back_off():
                return False
        return True

    def change_length(self, steps: int) -> None:
        """Plan the run for `steps` steps. Every rank must call this after the same step and with the same number."""
        self.progress.planned_steps = steps
        self.settle_intervals(steps)

    def settle_intervals(self, steps: int) -> None:
        """Compute the intervals that were left `auto` for this length, which may be an estimate."""
        self.planned, self.records.console.steps = self.config_for(steps), steps
        if self.step.ranks.is_rank_0:
            write_config(self.checkpoints.folder, self.planned)

    def heed_time(self, wanted: int) -> None:
        """Fix the length at which train.max_minutes ends, or settle the intervals for rank 0's estimate of it."""
        step, before, optimizer = self.progress.step, self.progress.planned_steps, self.config.optimizer
        if not fixes_length(wanted, step, optimizer):
            self.settle_intervals(wanted)
            return
        self.is_open, is_cosine = False, optimizer.schedule == "cosine"
        self.change_length(max(wanted, step + 1) if is_cosine else relength(step, before, wanted, optimizer))
        self.records.console.say(
            f"length: {self.progress.planned_steps} steps, fixed now: the time left is what they take"
        )

    def decay_if_worse(self) -> None:
        """Begin the decay of the learning rate now if the validation loss rises before the decay was planned to begin."""
        progress = self.progress
        read_once = progress.tokens > self.step.loader.tokens_per_epoch  # before, a rise is no memorising
        if not read_once or is_best_so_far(vars(progress), NOTICED_RISE):
            return
        self.begin_decay("the validation loss has risen")

    def heed_patience(self) -> None:
        """After train.patience evaluations in a row without a new best: begin the decay of the rate, or end the run."""
        progress, patience = self.progress, self.config.train.patience
        if progress.compared_bpb is None:  # of a part of the held-out text
            return
        is_best = progress.best_bpb is None or progress.compared_bpb < progress.best_bpb
        progress.evaluations_since_best = 0 if is_best else progress.evaluations_since_best + 1
        if patience is None or progress.evaluations_since_best < patience:
            return
        progress.evaluations_since_best = 0
        if not self.begin_decay(f"no new best in train.patience={patience} evaluations"):
            self.stopping.end_without_new_best()

    def begin_decay(self, why: str) -> bool:
        """Let the learning rate fall from now on, unless it falls already. Returns whether the run is now shorter."""
        step, before = self.progress.step, self.progress.planned_steps
        steps = relength(step, before, 1, self.config.optimizer)
        if steps < before:
            self.is_open = False
            self.change_length(steps)
            self.records.console.say(
                f"{why}: the learning rate falls from step {step} on, and the run ends at step {steps} instead of {before}"
            )
        return steps < before

    def config_for(self, steps: int) -> RunConfig:
        """The configuration with this length.

        Intervals that were left `auto` are computed for this length. Exception: in a run that is planned for a small text
        and has no train.max_minutes, they stay unchanged."""
        budget = self.stopping.budget
        if budget:
            return as_planned(self.config, self.left_auto, steps, budget.evaluations(steps))
        return as_planned(self.config, () if self.is_planned_for_text else self.left_auto, steps)

    def requests(self) -> list[Tensor]:
        """This rank's `StopRequests.flags`, with the length that rank 0 asks for by train.max_minutes."""
        step, budget, wanted = self.progress.step, self.stopping.budget, 0
        if budget and self.is_open and self.step.ranks.is_rank_0:
            optimizer = self.config.optimizer
            wanted = budget.wanted_steps(step, optimizer, lambda steps: self.config_for(steps).train.eval_every)
        return self.stopping.flags(wanted)

    def note_time(self, step_seconds: float, rate: float) -> None:
        """Count the time of the last step, and show the step."""
        self.progress.seconds += step_seconds
        self.throughput.add_step(step_seconds)
        if self.stopping.budget:
            self.stopping.budget.note_step()
        seconds_left = (self.progress.planned_steps - self.progress.step) * self.throughput.seconds_per_step
        tokens_per_second = self.throughput.tokens_per_second
        if self.figures:  # on a GPU, the first step is not read yet
            self.records.console.step(self.progress.step, self.figures["loss"], rate, tokens_per_second, seconds_left)

    def training_figures(self, update: Update, rate: float) -> dict[str, float | None]:
        """The record of the last step. Its speed is the mean since the last record."""
        figures: dict[str, float | None] = {
            "train/loss": self.figures["loss"],
            "train/gradient_norm": self.figures["norm"],
            "train/rate": rate,
            "train/epoch": self.progress.tokens / self.step.loader.tokens_per_epoch,
            **self.throughput.take_figures(),
        }
        if update.heads is not None:
            figures |= scalars(update.heads, "attention/step")
        if self.config.attention.qk_clip is not None:
            figures["attention/step/clipped_heads"] = self.step.take_clipped_heads()
        return figures

    def due_after(self, step: int) -> Due:
        """The actions that follow step number `step`, counted from 1."""
        train, last = self.planned.train, step == self.progress.planned_steps
        # A run that is planned for a small text keeps its intervals where it is shortened.
        length = self.config.steps if self.is_planned_for_text else self.planned.steps

        def every(interval: int | str) -> bool:
            assert isinstance(interval, int), "auto is resolved before training"
            return step % interval == 0

        return Due(
            record=every(train.log_every),
            evaluation=every(train.eval_every) or last,
            heads=every(max(1, length // MEASUREMENTS, train.eval_every // MOST_BETWEEN)),
            save=every(train.save_every) or last,
        )
