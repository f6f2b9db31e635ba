"""Opens the loggers of a run, and passes every record to all of them."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from andrea.checkpoint import Checkpoint
from andrea.config import LoggerConfig, RunConfig, to_plain
from andrea.model.size import flops_per_token
from andrea.runtime.files import StorageFailed
from andrea.runtime.streams import new_failures
from andrea.runtime.torchrun import RankLost
from andrea.training.parallel.strategy import Parallel
from andrea.training.parallel.watchdog import Watchdog
from andrea.training.progress import Progress
from andrea.training.records.console import Console
from andrea.training.records.logger import Logger, TensorBoard, summary_writer
from andrea.training.records.run_folder import RunFolder, RunLog, plain_text
from andrea.training.records.weights_and_biases import check_settings, choose_wandb_mode, open_wandb

# An error of the run folder ends the run: its records are the run's result. So does the loss of another rank.
ENDS_THE_RUN = (StorageFailed, RankLost)


@dataclass(frozen=True)
class Records:
    """Adds step, tokens, FLOPs and seconds to each record and gives it to every logger; only rank 0 has loggers."""

    loggers: list[Logger]
    console: Console
    run_log: RunLog
    progress: Progress
    watchdog: Watchdog
    failed_extras: set[str] = field(default_factory=set)  # names, each reported once

    def working(self, doing: str) -> None:
        """Announce slow work between two steps, on the terminal and to the watchdog."""
        self.watchdog.at(self.progress.step, doing)
        self.console.waiting(f"step {self.progress.step}: {doing} …")

    def extra(self, name: str) -> Extra:
        """The context of optional work: if the work fails, the run goes on."""
        return Extra(name, self)

    def guest(self, logger: str) -> Extra:
        """The context in which an optional logger is opened or called."""
        return self.extra(f"the logger {logger}")

    def log(self, figures: dict[str, Any]) -> None:
        self.send(lambda logger, axes: logger.record(axes | figures))

    def sample(self, sample: dict[str, str]) -> None:
        self.send(lambda logger, axes: logger.sample(axes | sample))

    def has_extras(self, page: str, step: int) -> tuple[bool, bool]:
        """Whether the run folder has the page of this name, and a sample, of this step."""
        folder = next(logger for logger in self.loggers if isinstance(logger, RunFolder))
        return folder.page_path(page, step).exists(), folder.has_sample(step)

    def page(self, name: str, html: str) -> None:
        self.send(lambda logger, axes: logger.page(axes | {"name": name, "html": html}))

    def alert(self, finding: str, begins: bool, message: str) -> None:
        about = {"finding": finding, "begins": begins, "message": message}
        self.send(lambda logger, axes: logger.alert(axes | about))

    def flush(self) -> None:
        """Flush the run folder's records to the disk: a checkpoint must not exist without the records before it."""
        for logger in self.loggers:
            if isinstance(logger, RunFolder):
                logger.flush()

    def finish(self, exit_code: int) -> None:
        self.send(lambda logger, axes: logger.finish(exit_code))

    def send(self, call: Callable[[Logger, dict[str, Any]], None]) -> None:
        """Call every logger. An error of the run folder ends the run; an error of any other logger does not."""
        axes = self.progress.axes()
        for logger in self.loggers:
            with nullcontext() if isinstance(logger, RunFolder) else self.guest(type(logger).__name__):
                call(logger, axes)
        for line in new_failures() if self.loggers else []:
            self.run_log.write(f"step {self.progress.step}: {line}")


@final
class Extra:
    """Context manager for an extra: optional work, such as a picture, whose failure must not end the run.

    It suppresses all errors except those in ENDS_THE_RUN. The first error of each extra is reported in one line, and
    its traceback is written to the run's log.
    """

    def __init__(self, name: str, records: Records) -> None:
        self.name, self.records = name, records

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ENDS_THE_RUN):
            return False
        if self.name not in self.records.failed_extras:
            self.records.failed_extras.add(self.name)
            what = f"step {self.records.progress.step}: {self.name} failed"
            self.records.run_log.write(f"{what}\n{''.join(traceback.format_exception(error))}")
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.records.console.say(
                f"{what} ({reason}); training continues; {self.records.run_log.path} has the traceback"
            )
        return True


def open_loggers(
    records: Records,
    config: RunConfig,
    folder: Path,
    checkpoint: Checkpoint | None,
    parallel: Parallel,
    facts: dict[str, Any],
    run_page: Callable[[Path], Logger] | None,
) -> None:
    """Open the loggers of a run: the run folder (first, because others read its files), the console, and the optional ones.

    An optional logger that cannot be opened is left out, and one line says so. facts: the result of `checkpoint_facts`.
    Its "wandb_id" is filled in, so that a resumed run continues its wandb run. run_page: makes the logger of run.html.
    """
    run_folder, say = RunFolder(folder), records.console.say
    run_folder.cut_after(checkpoint.step if checkpoint else -1, say)
    records.loggers.extend([run_folder, records.console])
    mode = choose_wandb_mode(config.logger.wandb)
    facts["wandb_id"] = checkpoint.state.get("wandb_id") if checkpoint else None
    if mode == "disabled":
        say("wandb: off (logger=wandb turns it on)")
    else:
        with records.guest("Wandb"):
            known = plain_text(to_plain(config)) | derived_facts(config, parallel, facts)
            names = folder.name, config.model.name, facts["wandb_id"]
            wandb = open_wandb(mode, say, config.logger, Path(config.runs_dir), *names, known)
            say(wandb.where)
            records.loggers.append(wandb)
            facts["wandb_id"] = wandb.run_id
            if checkpoint:
                wandb.take_over(folder)
    if config.logger.tensorboard:
        with records.guest("TensorBoard"):
            records.loggers.append(TensorBoard(folder, checkpoint.step + 1 if checkpoint else 0))
            say(f"tensorboard: on; `tensorboard --logdir {config.runs_dir}` shows all runs")
    if run_page:
        records.loggers.append(run_page(folder))


def check_loggers(config: LoggerConfig) -> None:
    """Raises UserError if a package or a login is missing, or a setting is refused, before the run has done any work."""
    if choose_wandb_mode(config.wandb) != "disabled":
        check_settings(config)
    if config.tensorboard:
        summary_writer()


def derived_facts(config: RunConfig, parallel: Parallel, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts for grouping and filtering runs in wandb, in addition to the configuration."""
    return {
        "parameters": sum(shape.numel() for shape in parallel.shapes.values()),
        "flops_per_token": flops_per_token(config.model, config.attention, parallel.model.n_vocab),
        "tokens_per_step": config.tokens_per_step,
        "tokenizer_identity": facts["tokenizer"],
        "data_fingerprint": facts["data"],
        "ranks": facts["ranks"],
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
