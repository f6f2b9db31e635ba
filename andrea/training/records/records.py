"""Opens the loggers of a run, and passes every record to all of them."""

import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from andrea.checkpoint import Checkpoint
from andrea.config import LoggerConfig, RunConfig, UserError, to_plain
from andrea.model.size import flops_per_token
from andrea.runtime.files import StorageFailed
from andrea.runtime.streams import new_failures
from andrea.runtime.torchrun import RankLost
from andrea.text.tokenizer import without_surrogates
from andrea.training.parallel.ranks import Parallel, Watchdog
from andrea.training.records import AXES, Logger, Progress
from andrea.training.records.console import Console
from andrea.training.records.run_folder import RunFolder, with_texts
from andrea.training.records.weights_and_biases import check_settings, choose_wandb_mode, open_wandb

# An error of the run folder ends the run: its records are the run's result. So does the loss of another rank.
ENDS_THE_RUN = (StorageFailed, RankLost)
LOG = "run.log"


@dataclass(frozen=True)
class Records:
    """Adds step, tokens, FLOPs and seconds to each record and gives it to every logger; only rank 0 has loggers."""

    loggers: list[Logger]
    console: Console
    folder: Path  # of the run; its run.log has the errors that did not end the run, and is missing without such errors
    progress: Progress
    watchdog: Watchdog
    failed_extras: set[str] = field(default_factory=set)  # names, each reported once

    def write_log(self, text: str) -> None:
        """Append `text` with the date and time. If the disk is full, the text is lost, and the run goes on."""
        with suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def working(self, doing: str) -> None:
        """Announce slow work between two steps, on the terminal and to the watchdog."""
        self.watchdog.at(self.progress.step, doing)
        self.console.waiting(f"step {self.progress.step}: {doing} …")

    @contextmanager
    def extra(self, name: str) -> Iterator[None]:
        """The context of optional work, such as a picture: if the work fails, the run goes on.

        It suppresses all errors except those in ENDS_THE_RUN. The first error of each name is reported in one line, and
        its traceback is written to the run's log.
        """
        try:
            yield
        except ENDS_THE_RUN:
            raise
        except Exception as error:
            if name in self.failed_extras:
                return
            self.failed_extras.add(name)
            what = f"step {self.progress.step}: {name} failed"
            self.write_log(f"{what}\n{''.join(traceback.format_exception(error))}")
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.console.say(f"{what} ({reason}); training continues; {self.folder / LOG} has the traceback")

    def guest(self, logger: str) -> AbstractContextManager[None]:
        """The context in which an optional logger is opened or called."""
        return self.extra(f"the logger {logger}")

    def log(self, figures: dict[str, Any]) -> None:
        self.send(lambda logger, axes: logger.record(axes | figures))

    def sample(self, sample: dict[str, str]) -> None:
        self.send(lambda logger, axes: logger.sample(axes | sample))

    def has_extras(self, page: str, step: int) -> tuple[bool, bool]:
        """Whether the run folder has the page of this name, and a sample, of this step."""
        folder = RunFolder(self.folder)
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
        axes = {axis: getattr(self.progress, axis) for axis in ("step", *AXES)}
        for logger in self.loggers:
            with nullcontext() if isinstance(logger, RunFolder) else self.guest(type(logger).__name__):
                call(logger, axes)
        for line in new_failures() if self.loggers else []:
            self.write_log(f"step {self.progress.step}: {line}")


def open_loggers(
    records: Records,
    config: RunConfig,
    checkpoint: Checkpoint | None,
    parallel: Parallel,
    facts: dict[str, Any],
    run_page: Callable[[Path], Logger],
) -> None:
    """Open the loggers of a run: the run folder (first, because others read its files), the console, and the optional ones.

    An optional logger that cannot be opened is left out, and one line says so. facts: the result of `checkpoint_facts`.
    Its "wandb_id" is filled in, so that a resumed run continues its wandb run. run_page: makes the logger of run.html.
    """
    folder, say = records.folder, records.console.say
    run_folder = RunFolder(folder)
    run_folder.cut_after(checkpoint.step if checkpoint else -1, say)
    records.loggers.extend([run_folder, records.console])
    mode = choose_wandb_mode(config.logger.wandb)
    facts["wandb_id"] = checkpoint.state.get("wandb_id") if checkpoint else None
    if mode == "disabled":
        say("wandb: off (logger=wandb turns it on)")
    else:
        with records.guest("Wandb"):
            known = with_texts(to_plain(config), str) | derived_facts(config, parallel, facts)
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


# ---------------------------------------------------------------------------------------------------------- tensorboard
# logger.tensorboard: the records as TensorBoard's event files, in the run folder; `tensorboard --logdir runs` shows them.


@final
class TensorBoard(Logger):
    """Writes figures as scalars, figures of single heads as histograms over the heads, and samples and findings as text."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """first_step: the step of the next record. TensorBoard ignores earlier processes' records from this step on."""
        silence_writing_thread()
        self.writer = summary_writer()(str(folder / "tensorboard"), purge_step=first_step or None)

    def record(self, record: dict[str, Any]) -> None:
        step = record["step"]
        for key, value in record.items():
            if isinstance(value, list):
                numbers = [number for row in value for number in row if number is not None]
                if numbers:
                    self.writer.add_histogram(key, np.array(numbers), step)
            elif isinstance(value, str):
                self.writer.add_text(key, without_surrogates(value), step)
            elif value is not None and key != "step":
                self.writer.add_scalar(key, value, step)

    def sample(self, sample: dict[str, Any]) -> None:
        text = without_surrogates(sample["prompt"] + sample["text"])
        indented = "".join(f"    {line}\n" for line in text.split("\n"))  # shown unchanged: TensorBoard reads Markdown
        self.writer.add_text("sample", indented, sample["step"])

    def alert(self, alert: dict[str, Any]) -> None:
        text = alert["message"] if alert["begins"] else f"ended: {alert['message']}"
        self.writer.add_text(f"health/{alert['finding']}", without_surrogates(text), alert["step"])

    def finish(self, exit_code: int) -> None:
        self.writer.close()


def summary_writer() -> type:
    """torch's writer of event files. Raises UserError if the package tensorboard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            'logger=tensorboard needs tensorboard; install it with: pip install -e ".[tensorboard]"'
        ) from None
    return SummaryWriter


def silence_writing_thread() -> None:
    """Let TensorBoard's thread end without a traceback if writing fails: its writer raises the error again when called."""
    usual = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            usual(failed)

    threading.excepthook = hook
