"""The end of a run: save a checkpoint, print the reason and the next command, return the exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from andrea.checkpoint import checkpoints_of, result_path, step_of
from andrea.config import RunConfig, settings_of_runs
from andrea.runtime.device import peak_memory_bytes
from andrea.runtime.files import StorageFailed
from andrea.runtime.own_parts import is_own
from andrea.runtime.program import torchrun_command, typed_command, typed_words
from andrea.training.checkpoints import RunCheckpoints
from andrea.training.evaluation import Evaluator
from andrea.training.health.check import optimizer_remedy, remedy_settings
from andrea.training.progress import Progress
from andrea.training.records.console import part_words
from andrea.training.records.record_file import read_lines
from andrea.training.records.records import Records
from andrea.training.stop_requests import StopRequests


@dataclass(frozen=True)
class Endings:
    """The three ways in which a run ends without an exception. Every rank must call them."""

    config: RunConfig
    progress: Progress
    evaluator: Evaluator
    checkpoints: RunCheckpoints
    records: Records
    stopping: StopRequests
    is_planned_for_text: bool

    def conclude(self) -> int:
        """End a run that is done, out of time or interrupted. Returns 0, or 128 + the signal's number."""
        progress, checkpoints, console = self.progress, self.checkpoints, self.records.console
        step, done = self.evaluator.step, progress.step == progress.planned_steps
        is_out_of_time = self.stopping.agreed == "stopped" and not self.stopping.is_out_of_patience
        if not done and is_out_of_time:
            self.records.log(self.evaluator.evaluate(size_ratios=None, whole=True))
        checkpoints.save_if_new()
        if not done and is_out_of_time:
            self.evaluator.show_sample()
        self.records.watchdog.rest(progress.step, "writing the last checkpoint to the disk")
        if done:
            checkpoints.saver.conclude()
        checkpoints.saver.wait()
        why = "done" if done else self.stopping.agreed
        peak = torch.tensor(float(peak_memory_bytes(step.device)))
        figures = {
            "val/loss": progress.val_loss,
            "val/bpb": progress.val_bpb,
            "train/peak_memory_bytes": int(step.ranks.maximum(peak)),
        }
        if progress.val_tokens is not None:
            figures["val/tokens"] = progress.val_tokens
        self.records.log({"event": why, **figures, "checkpoint": str(checkpoints.path)})
        console.stop()
        bits = (
            f" · {progress.val_bpb:.4f} bits/byte{part_words(progress.val_tokens)}"
            if progress.val_bpb is not None
            else ""
        )
        result = result_path(checkpoints.path, vars(progress))
        console.say(
            f"{why} at step {progress.step} of {progress.planned_steps}{self.reason(done)}{bits} · {checkpoints.path}"
        )
        if step.ranks.is_rank_0:
            self.show_result(result)
        sample = f"{typed_command('sample')} {typed_words(checkpoint=result, **trust(self.config))}"
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
        if self.is_planned_for_text and evaluations:
            judged = evaluations[0].get("val/judged_bpb")
            console.say(
                "the held-out text is too small to judge the result on a part that was not used to choose the step"
                if judged is None
                else f"judged on the half of the held-out text that was not used to choose the step: {judged:.4f} bits/byte"
            )

    def stop_not_finite(self, figures: dict[str, float]) -> int:
        """End a run whose loss, gradient or weights are not finite, without saving them. Returns exit code 3.

        figures: number, loss and gradient norm of the last step whose results were read from the device.
        """
        checkpoints = self.checkpoints
        checkpoints.saver.wait()
        saved = checkpoints_of(checkpoints.folder)
        remedies = [optimizer_remedy(self.config.optimizer)]
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
    usual, places = settings_of_runs(), {"runs_dir": folder.parent, "data_dir": Path(config.data_dir)}
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
    return {"trust": "true"} if any(map(is_own, (config.attention.compatibility, config.model.mlp))) else {}
