"""The training loop: its speed, what stops it (signals, patience, time), its checkpoints, and its end."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from andrea.checkpoint import checkpoints_of, is_best_so_far, result_path, step_name, step_of
from andrea.checkpoint.find_and_prune import own_figure
from andrea.checkpoint.model import own_parts
from andrea.config import RunConfig, UserError, to_plain
from andrea.config.keys import own_values
from andrea.runtime.files import StorageFailed
from andrea.runtime.free_and_peak_memory import peak_memory_bytes
from andrea.runtime.program import torchrun_command, typed_command, typed_words
from andrea.runtime.shared_cores import sharing_cores
from andrea.runtime.system import HANG_UP
from andrea.runtime.user_classes import is_own
from andrea.text.corpus import Corpus
from andrea.training.evaluation import Evaluator, finite_or_none, scalars
from andrea.training.health.health import Health, optimizer_remedy, remedy_settings
from andrea.training.optimizer import LossScale, rate_at, relength
from andrea.training.parallel.ranks import Ranks
from andrea.training.parallel.saver import Saver
from andrea.training.planning.length import TimeBudget, fixes_length, is_open
from andrea.training.planning.plan import Plan
from andrea.training.records.console import part_words
from andrea.training.records.records import Records
from andrea.training.records.run_folder import read_lines, write_config
from andrea.training.step import HostCopy, TrainingStep, Update

# ----------------------------------------------------------------------------------------------------------- throughput


class Throughput:
    """The speed of training since the last record.

    peak_flops: the peak of one device, in FLOP/s. If it is None, no MFU (model FLOPs utilisation) is reported.
    """

    def __init__(self, tokens_per_step: int, flops_per_token: int, peak_flops: float | None, n_device: int) -> None:
        self.tokens_per_step, self.flops_per_token = tokens_per_step, flops_per_token
        self.peak_flops = peak_flops * n_device if peak_flops else None
        self.steps, self.seconds = 0, 0.0

    def add_step(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step

    def take_figures(self) -> dict[str, float]:
        """The figures for a record. Resets the counts."""
        figures = {
            "train/tokens_per_second": self.tokens_per_second,
            "train/seconds_per_step": self.seconds_per_step,
        }
        if self.peak_flops:
            figures["train/mfu"] = self.tokens_per_second * self.flops_per_token / self.peak_flops
        self.steps, self.seconds = 0, 0.0
        return figures


# -------------------------------------------------------------------------------------------------------- stop requests
# Requests to stop before the last step: a signal, `train.max_minutes`, or `train.patience`. All ranks agree on them once a step.

SIGNALS = (signal.SIGTERM, signal.SIGINT, *HANG_UP)  # if ranks received several, the first of these counts


class StopRequests:
    """The stop requests of this process, and the decision that all ranks have agreed on.

    budget: the time of train.max_minutes, which stops the run only if the user has set it (`TimeBudget.is_limit`). waiting: shows
    a line on the terminal.
    """

    def __init__(self, budget: TimeBudget | None, device: torch.device, waiting: Callable[[str], None]) -> None:
        self.budget, self.device, self.waiting = budget, device, waiting
        self.signal: int | None = None  # the first one this process received
        self.agreed: Literal["interrupted", "stopped"] | None = None  # why all ranks stop after this step
        self.agreed_signal: int | None = None  # one that this rank or another received
        self.is_out_of_patience = False  # whether train.patience is the reason
        self.wanted_steps = 0  # the length that rank 0 has last asked for; 0: none since it was taken

    def flags(self, wanted_steps: int) -> list[Tensor]:
        """This rank's requests, to be summed over ranks: signals, time limit and length, 0-dim on the device.

        The time limit and each of SIGNALS is 0 or 1. wanted_steps: the length that rank 0 asks for; 0 on all other ranks,
        and where rank 0 asks for none.
        """
        out_of_time = self.budget is not None and self.budget.is_over()
        requests = (*(self.signal == number for number in SIGNALS), out_of_time, wanted_steps)
        return [torch.full((), float(request), device=self.device) for request in requests]  # filled on the device

    def agree(self, summed_flags: Sequence[float]) -> None:
        """Decide whether and why all ranks stop, and the length. summed_flags: `flags` summed over all ranks."""
        *received, out_of_time, wanted_steps = summed_flags
        self.wanted_steps = int(wanted_steps) or self.wanted_steps
        if self.agreed:
            return
        self.agreed_signal = next((number for number, flag in zip(SIGNALS, received, strict=True) if flag), None)
        self.agreed = "interrupted" if self.agreed_signal else "stopped" if out_of_time else None

    def end_without_new_best(self) -> None:
        """Stop because of train.patience. Every rank must call this after the same step."""
        if not self.agreed:
            self.agreed, self.is_out_of_patience = "stopped", True

    def take_wanted_steps(self) -> int:
        """The length that all ranks have agreed on since the last call; 0: none."""
        wanted, self.wanted_steps = self.wanted_steps, 0
        return wanted

    @property
    def exit_code(self) -> int:
        """128 + the signal's number if any rank received a signal, else 0: reaching the time limit is not a failure."""
        return 128 + self.agreed_signal if self.agreed_signal else 0

    @contextmanager
    def signals_caught(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP let the step finish and the run save; a second Ctrl-C ends the process at once.

        A second SIGTERM is ignored: a cluster sends SIGTERM to torchrun and to its ranks, and torchrun forwards its
        own. SIGHUP means that the terminal is gone; where it was ignored before, as under nohup, it stays ignored. Only
        Python's main thread can catch signals; in another thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = self.signal or number
            self.waiting("interrupted: finishing the step and saving (interrupt again to quit at once) …")

        ignored = [number for number in HANG_UP if signal.getsignal(number) == signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in SIGNALS if number not in ignored}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@dataclass
class RunCheckpoints:
    """Saves the checkpoints of one run. facts: the result of `checkpoint_facts`, written to each state.json."""

    saver: Saver
    scale: LossScale
    health: Health
    records: Records
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        self.folder, self.progress = self.records.folder, self.records.progress
        self.saved_step = self.progress.step if checkpoints_of(self.folder) else None
        self.damaged = ""  # names a tensor with a non-finite value, for the message that ends the run

    @property
    def path(self) -> Path:
        """The folder of the current step's checkpoint, which may not exist yet."""
        return self.folder / "checkpoints" / step_name(self.progress.step)

    def is_saved(self) -> bool:
        return self.saved_step == self.progress.step

    def is_finite(self) -> bool:
        """Whether weights and optimizer state are finite on all ranks. Every rank must call this."""
        parallel, device = self.saver.parallel, self.scale.factor.device
        kept = parallel.local_parameters | self.saver.optimizer.state_tensors()
        finite = torch.stack([tensor.detach().isfinite().all().to(device) for tensor in kept.values()])
        wrong = [name for name, fine in zip(kept, finite.tolist(), strict=True) if not fine]
        if bool(parallel.ranks.minimum(torch.tensor(float(not wrong), device=device))):
            return True
        self.damaged = f", but {wrong[0] if wrong else 'a tensor of another rank'} is not finite: nothing was saved"
        return False

    def save(self) -> None:
        """Write a checkpoint; the saver then marks the best one and removes the oldest. Every rank must call this."""
        progress = self.progress
        self.records.working("saving")
        self.records.flush()
        figure = own_figure(vars(progress))
        if figure is not None and (progress.best_bpb is None or figure < progress.best_bpb):
            progress.best_bpb = figure
        state = self.facts | vars(progress) | {"loss_scale": self.scale.state(), "health": self.health.state()}
        self.saver.save(state | {"torch_random": torch.get_rng_state().tolist()})
        self.saved_step = progress.step

    def save_again(self) -> None:
        """Write the current step's checkpoint anew, with what is known of it by now. Every rank must call this.

        The old one, if there is one, stays in its place until the new one is whole.
        """
        self.save()
        self.saver.wait()

    def save_if_new(self) -> None:
        if not self.is_saved():
            self.save()


def checkpoint_facts(plan: Plan, corpus: Corpus, ranks: Ranks, run_id: str) -> dict[str, Any]:
    """Facts that each checkpoint records. A resumed run is compared with them. `open_loggers` adds wandb's run id."""
    return {
        "left_auto": plan.left_auto,
        "groups": plan.groups,
        "run": run_id,
        "config": to_plain(plan.config),
        "working_folder": os.getcwd(),  # relative paths in `config` mean this folder
        "data": corpus.fingerprint,
        "tokenizer": corpus.tokenizer.identity,
        "ranks": ranks.size,
        "own_parts": own_parts(plan.config.model, plan.config.attention),
        "wandb_id": None,
    }


# ---------------------------------------------------------------------------------------------------------- the trainer

NOTICED_RISE = 0.01  # of the validation figure, relative to its best: less may be chance
MEASUREMENTS = 20  # of the attention heads in a run: enough for a curve of each head
MOST_BETWEEN = 6  # of them between two evaluations: a run that is evaluated rarely is measured rarely too


@dataclass
class Trainer:
    """Trains to the last step, the time limit, a signal or a failure; `train` returns the process's exit code."""

    plan: Plan
    step: TrainingStep
    evaluator: Evaluator
    checkpoints: RunCheckpoints
    records: Records
    stopping: StopRequests
    throughput: Throughput

    def __post_init__(self) -> None:
        self.config, self.progress = self.plan.config, self.records.progress
        self.unread: list[tuple[int, HostCopy]] = []  # steps whose `Update.numbers` the host has not read yet
        self.figures: dict[str, float] = {}  # number, loss and gradient norm of the last step that was read
        self.unjudged: list[tuple[int, float, float]] = []  # step, loss, norm that the health checks do not know yet
        self.plan_intervals(self.progress.planned_steps)
        budget, optimizer = self.stopping.budget, self.config.optimizer
        self.is_open = budget is not None and is_open(self.progress.step, self.progress.planned_steps, optimizer)
        if budget and self.is_open:  # as long as it may be: train.max_minutes lets the rate fall earlier
            self.progress.planned_steps = budget.most_steps

    def train(self) -> int:
        is_alone = self.step.device.type == "cpu" and self.step.ranks.size == 1  # ranks also wait for each other
        with self.stopping.signals_caught(), self.records.console.live_line(), sharing_cores(is_alone):
            try:
                return self.train_steps()
            except UserError:  # the weights are intact; with several ranks, the others are in the middle of a step
                if self.progress.step and self.step.ranks.size == 1 and self.read_figures(wait=True):
                    self.tell_health()
                    if not self.checkpoints.is_saved() and self.checkpoints.is_finite():
                        self.checkpoints.save()
                raise

    def train_steps(self) -> int:
        config, progress = self.config, self.progress
        if progress.step and "evaluation" in self.due_at(progress.step):  # the run may have been killed after the save
            if progress.evaluated_step != progress.step:  # such as one whose held-out text could not be read
                self.records.log(self.evaluator.evaluate(size_ratios=None))
                self.heed_evaluation()
                self.checkpoints.save_again()
            self.evaluator.make_up()
        if self.stopping.budget:
            self.stopping.budget.lap()
        while progress.step < progress.planned_steps and not self.stopping.agreed:
            clock = time.perf_counter()
            self.records.watchdog.at(progress.step + 1, "training step")
            due = self.due_at(progress.step + 1)
            rate = rate_at(progress.step, progress.planned_steps, config.optimizer)
            batch = self.step.batch(progress.step)
            update = self.step.run(batch, rate, self.requests, measure_size="evaluation" in due)
            progress.step += 1
            progress.tokens += self.throughput.tokens_per_step
            progress.flops += self.throughput.tokens_per_step * self.throughput.flops_per_token
            self.unread.append((progress.step, HostCopy(update.numbers)))
            self.step.prefetch(progress.step)
            if not self.read_figures(wait="record" in due or "save" in due):
                return self.stop_not_finite()
            if ("evaluation" in due or "save" in due) and not self.checkpoints.is_finite():
                return self.stop_not_finite()
            self.note_time(time.perf_counter() - clock, rate)
            if (wanted := self.stopping.take_wanted_steps()) and self.is_open:
                self.heed_time(wanted)
            self.fix_length_if_it_holds()
            if due:
                self.checkpoints.saver.check()
                self.tell_health()
                self.do(due, update, rate)
            if "evaluation" in due and (failed := self.evaluator.failed()):
                return self.stop_failed(failed)
        if not self.read_figures(wait=True) or not (self.checkpoints.is_saved() or self.checkpoints.is_finite()):
            return self.stop_not_finite()
        self.tell_health()
        return self.conclude()

    def due_at(self, step: int) -> set[str]:
        """What follows step number `step`, counted from 1."""
        train = self.planned.train
        is_last = step == self.progress.planned_steps
        is_evaluated = is_last or step % train.eval_every == 0
        is_due = {
            "heads": step % self.heads_every == 0,
            "evaluation": is_evaluated,
            "record": is_evaluated or step % train.log_every == 0,
            "save": is_last or step % train.save_every == 0,
        }
        return {name for name, due in is_due.items() if due}

    def do(self, due: set[str], update: Update, rate: float) -> None:
        """Do what follows a step, outside the clock. update, rate: its results, and its rate as a share of the peak."""
        evaluated: dict[str, Any] = {}
        if "heads" in due:
            self.records.log(self.evaluator.measure_heads())
        if "evaluation" in due:
            evaluated = self.evaluator.evaluate(update.size_ratios)
        if "record" in due:
            self.records.log(self.training_figures(update, rate) | evaluated)
        is_to_save = "evaluation" in due and self.heed_evaluation()
        if is_to_save or "save" in due:  # before the lens page and the sample: neither can cost it
            self.checkpoints.save()
        if "evaluation" in due:
            self.evaluator.draw_attention()
            self.evaluator.show_sample()
            if self.stopping.budget:
                self.stopping.budget.note_evaluation()
        self.evaluator.forget()

    def read_figures(self, wait: bool) -> bool:
        """Read loss, gradient norm and flags of completed steps. Returns False if a step was not finite.

        Without `wait`, the newest step on a GPU is left unread: the host then queues one step while the GPU computes
        another. An fp16 step that only overflowed its loss scale is not a failure: the scale was halved and training goes on.
        """
        leave_newest = self.step.runs_ahead and not wait
        while len(self.unread) > int(leave_newest):
            number, numbers = self.unread.pop(0)
            loss, norm, finite, *stop_flags = numbers.read()
            self.figures = {"step": number, "loss": loss, "norm": norm}
            self.stopping.agree(stop_flags)
            if finite:
                self.unjudged.append((number, loss, norm))
            elif not self.step.scale.may_back_off():
                return False
            else:
                self.records.console.say(f"step {number}: fp16 overflowed: no update, and the loss scale is halved")
        return True

    def tell_health(self) -> None:
        """Hand the health checks the steps that were read since the last call: before each evaluation and each save."""
        is_comparable = self.step.objective is None or self.step.objective.is_loss_comparable
        for step in self.unjudged if is_comparable else ():
            self.evaluator.health.note_step(*step)
        self.unjudged.clear()

    def settle_intervals(self, steps: int) -> None:
        """Compute the intervals that were left `auto` for this length, which may be an estimate; the same on every rank."""
        self.plan_intervals(steps)
        self.records.console.steps = steps
        if self.step.ranks.is_rank_0:
            write_config(self.checkpoints.folder, self.planned)

    def plan_intervals(self, steps: int) -> None:
        self.planned = self.config_for(steps)
        train = self.planned.train
        assert train.eval_every != "auto" and train.save_every != "auto", "auto is resolved before training"
        # A run that is planned for a small text keeps its intervals where it is shortened.
        length = self.config.steps if self.plan.is_for_text else self.planned.steps
        self.heads_every = max(1, length // MEASUREMENTS, train.eval_every // MOST_BETWEEN)

    def heed_time(self, wanted: int) -> None:
        """Fix the length at which train.max_minutes ends, or settle the intervals for rank 0's estimate of it."""
        step, before, optimizer = self.progress.step, self.progress.planned_steps, self.config.optimizer
        if not fixes_length(wanted, step, optimizer):
            self.settle_intervals(wanted)
            return
        self.is_open, is_cosine = False, optimizer.schedule == "cosine"
        steps = max(wanted, step + 1) if is_cosine else relength(step, before, wanted, optimizer)
        self.progress.planned_steps = steps
        self.settle_intervals(steps)
        budget, speed = self.stopping.budget, self.throughput.tokens_per_second
        assert budget is not None
        remedy = "" if budget.is_limit else f"; train.max_minutes=null makes all {before}"
        self.records.console.say(
            f"length: {steps} steps, fixed now: at {speed:,.0f} tokens/s, these fit into "
            f"train.max_minutes={budget.minutes:g}{remedy}"
        )

    def fix_length_if_it_holds(self) -> None:
        """Take the planned length for the run's, where the machine has become faster than rank 0's estimate."""
        step, steps, optimizer = self.progress.step, self.progress.planned_steps, self.config.optimizer
        if not self.is_open:
            return
        if not is_open(step, steps, optimizer):  # the rate falls, and nobody asked for a shorter run
            self.is_open = False
            self.settle_intervals(steps)
        elif not is_open(step, self.planned.steps, optimizer):
            self.records.console.steps = steps

    def heed_evaluation(self) -> bool:
        """Begin the decay of the learning rate, or end the run, where its last evaluation asks for it.

        On a small text the decay begins early if the validation loss rises; with train.patience, after so many evaluations
        in a row without a new best, and the run ends if the rate falls already.
        Returns whether train.patience watches the run and this is a new best, which is saved: it may be the run's result.
        """
        progress, patience = self.progress, self.config.train.patience
        n_read = progress.step * self.config.tokens_read_per_step
        is_read_once = n_read > self.step.loader.tokens_per_epoch  # before, a rise is no memorising
        if self.plan.is_for_text and is_read_once and not is_best_so_far(vars(progress), NOTICED_RISE):
            self.begin_decay("the validation loss has risen")
        if progress.compared_bpb is None:  # of a part of the held-out text
            return False
        is_best = progress.best_bpb is None or progress.compared_bpb < progress.best_bpb
        progress.evaluations_since_best = 0 if is_best else progress.evaluations_since_best + 1
        if patience is not None and progress.evaluations_since_best >= patience:
            progress.evaluations_since_best = 0
            if not self.begin_decay(f"no new best in train.patience={patience} evaluations"):
                self.stopping.end_without_new_best()
        return is_best and patience is not None

    def begin_decay(self, why: str) -> bool:
        """Let the learning rate fall from now on, unless it falls already. Returns whether the run is now shorter."""
        step, before = self.progress.step, self.progress.planned_steps
        steps = relength(step, before, 1, self.config.optimizer)
        if steps < before:
            self.is_open, self.progress.planned_steps = False, steps
            self.settle_intervals(steps)
            self.records.console.say(
                f"{why}: the learning rate falls from step {step} on, and the run ends at step {steps} instead of {before}"
            )
        return steps < before

    def config_for(self, steps: int) -> RunConfig:
        """The configuration with this length, and with intervals for it."""
        budget = self.stopping.budget
        return self.plan.of_length(steps, budget.evaluations(steps) if budget else None)

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
            "train/loss": finite_or_none(self.figures["loss"]),  # in fp16 it may overflow, as its gradient
            "train/gradient_norm": finite_or_none(self.figures["norm"]),
            "train/rate": rate,
            "train/epoch": self.progress.step * self.config.tokens_read_per_step / self.step.loader.tokens_per_epoch,
            **self.throughput.take_figures(),
            **(self.step.objective.figures() if self.step.objective else {}),
        }
        if self.step.scale.active:
            figures["train/loss_scale"] = float(self.step.scale.factor)
        if update.heads is not None:
            figures |= scalars(update.heads, "attention/step")
        if self.config.attention.qk_clip is not None:
            figures["attention/step/clipped_heads"] = self.step.take_clipped_heads()
        return figures

    # ---------------------------------------------------------------------------------------------- the ways to end
    # Save a checkpoint, print the reason and the next command, return the exit code. Every rank must call these.

    def conclude(self) -> int:
        """End a run that is done, out of time or interrupted. Returns 0, or 128 + the signal's number."""
        progress, checkpoints, console = self.progress, self.checkpoints, self.records.console
        done = progress.step == progress.planned_steps
        is_out_of_time = self.stopping.agreed == "stopped" and not self.stopping.is_out_of_patience
        is_judged = progress.evaluated_step == progress.step and self.config.train.eval_tokens is None
        if not done and is_out_of_time and not is_judged:
            self.records.log(self.evaluator.evaluate(size_ratios=None, whole=True))
            checkpoints.save_again()  # it may be saved already, without these figures
            self.evaluator.show_sample()
        checkpoints.save_if_new()
        self.records.watchdog.rest(progress.step, "writing the last checkpoint to the disk")
        if done:
            checkpoints.saver.conclude()
        checkpoints.saver.wait()
        why = "done" if done else self.stopping.agreed
        peak = torch.tensor(float(peak_memory_bytes(self.step.device)))
        figures = {
            "val/loss": progress.val_loss,
            "val/bpb": progress.val_bpb,
            "train/peak_memory_bytes": int(self.step.ranks.maximum(peak)),
        }
        if progress.val_tokens is not None:
            figures["val/tokens"] = progress.val_tokens
        self.records.log({"event": why, **figures, "checkpoint": str(checkpoints.path)})
        console.stop()
        bits = ""
        if progress.val_bpb is not None:
            bits = f" · {progress.val_bpb:.4f} bits/byte{part_words(progress.val_tokens)}"
        result = result_path(checkpoints.path, vars(progress), lambda fault: console.say(f"skipped: {fault}"))
        console.say(
            f"{why} at step {progress.step} of {progress.planned_steps}{self.reason(done)}{bits} · {checkpoints.path}"
        )
        if self.step.ranks.is_rank_0:
            self.show_result(result)
        chat = {"chat": "true"} if self.config.data.kind in ("chat", "python_chat") else {}
        sample = f"{typed_command('sample')} {typed_words(checkpoint=result, **chat, **trust(self.config))}"
        is_ended = done or self.stopping.is_out_of_patience
        console.say(f"next: {sample}" if is_ended else f"continue with: {continuing(checkpoints.folder, self.config)}")
        return 0 if done else self.stopping.exit_code

    def reason(self, done: bool) -> str:
        """The words on train.max_minutes or train.patience in the run's last line; empty if neither decided its end."""
        if self.stopping.is_out_of_patience:
            return f", no new best in train.patience={self.config.train.patience} evaluations"
        budget, is_planned = self.stopping.budget, self.progress.planned_steps != self.config.steps
        if budget is None or self.stopping.agreed == "interrupted" or (done and not is_planned):
            return ""
        return f", {'the length planned for' if done else 'at the end of'} train.max_minutes={budget.minutes:g}"

    def show_result(self, result: Path) -> None:
        """Print which step is the result if it is not the last, and its figure on text that was not used to choose it."""
        records, console = read_lines(self.checkpoints.folder / "metrics.jsonl"), self.records.console
        evaluations = [each for each in records if each.get("step") == step_of(result) and "val/bpb" in each]
        if result != self.checkpoints.path and evaluations:
            bits = evaluations[0]["val/bpb"]
            console.say(
                f"result: step {step_of(result)}, which had the best evaluation, {bits:.4f} bits/byte · {result}"
            )
        if self.plan.is_for_text and evaluations:
            judged = evaluations[0].get("val/judged_bpb")
            console.say(
                "the held-out text is too small to judge the result on a part that was not used to choose the step"
                if judged is None
                else f"judged on the half of the held-out text that was not used to choose the step: {judged:.4f} bits/byte"
            )

    def stop_not_finite(self) -> int:
        """End a run whose loss, gradient or weights are not finite, without saving them. Returns exit code 3."""
        checkpoints, figures = self.checkpoints, self.figures
        checkpoints.saver.wait()
        saved = checkpoints_of(checkpoints.folder)
        remedies = [optimizer_remedy(self.config)]
        if self.config.precision != "fp32":
            remedies.append(remedy_settings("precision=fp32"))
        self.records.console.stop()
        self.records.console.say(
            f"error: step {figures['step']}: loss {figures['loss']:.4g}, gradient norm {figures['norm']:.4g}"
            f"{checkpoints.damaged or ': not finite, update not applied'}. Last good checkpoint: "
            f"{saved[-1] if saved else 'none'}. To continue with {continuing(checkpoints.folder, self.config)}, "
            f"{' or '.join(remedies)}"
        )
        return 3

    def stop_failed(self, findings: list[str]) -> int:
        """Save and end a run that the health checks have judged as failed. Returns exit code 4."""
        progress, checkpoints, console = self.progress, self.checkpoints, self.records.console
        checkpoints.save_if_new()
        checkpoints.saver.wait()
        names, path = ", ".join(findings), str(checkpoints.path)
        self.records.log({"event": "failed", "health/failed": names, "val/bpb": progress.val_bpb, "checkpoint": path})
        console.stop()
        console.say(f"error: stopped at step {progress.step} of {progress.planned_steps}: {names} · {path}")
        console.say(f"continue anyway: {continuing(checkpoints.folder, self.config)} health.on_failure=warn")
        return 4


def continuing(folder: Path, config: RunConfig) -> str:
    """The command that continues the run in `folder`, with the keys that a checkpoint does not keep. Type it in this folder."""
    usual, places = own_values("train"), {"runs_dir": folder.parent, "data_dir": Path(config.data_dir)}
    others = {key: place for key, place in places.items() if place != Path(usual[key])}
    words = typed_words(name=folder.name, resume="auto", **others, **trust(config))
    return f"{typed_command('train', torchrun_command())} {words}"


@contextlib.contextmanager
def advising_to_continue(folder: Path, config: RunConfig) -> Iterator[None]:
    """Context in which the advice of a StorageFailed names the command that continues the run."""
    try:
        yield
    except StorageFailed as error:
        error.advice = error.advice.replace("resume=auto", continuing(folder, config))
        raise


def trust(config: RunConfig) -> dict[str, str]:
    """The word that a command needs to import the user's own classes that this run uses."""
    parts = (config.attention.compatibility, config.model.mlp, config.objective.reward)
    return {"trust": "true"} if any(map(is_own, parts)) else {}
