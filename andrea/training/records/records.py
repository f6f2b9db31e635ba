"""Passes every record of a run to all loggers."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig, to_plain
from andrea.model.size import flops_per_token
from andrea.training.parallel.strategy import Parallel
from andrea.training.parallel.watchdog import Watchdog
from andrea.training.progress import Progress
from andrea.training.records.console import Console
from andrea.training.records.logger import Logger
from andrea.training.records.run_folder import RunFolder, plain_text
from andrea.training.records.weights_and_biases import Wandb, choose_wandb_mode


@dataclass(frozen=True)
class Records:
    """Adds step, tokens, FLOPs and seconds to each record and gives it to every logger; only rank 0 has loggers."""

    loggers: list[Logger]
    console: Console
    progress: Progress
    watchdog: Watchdog

    def working(self, doing: str) -> None:
        """Announce slow work between two steps, on the terminal and to the watchdog."""
        self.watchdog.at(self.progress.step, doing)
        self.console.waiting(f"step {self.progress.step}: {doing} …")

    def log(self, figures: dict[str, Any]) -> None:
        record = self.progress.axes() | figures
        for logger in self.loggers:
            logger.record(record)

    def sample(self, sample: dict[str, str]) -> None:
        for logger in self.loggers:
            logger.sample(self.progress.axes() | sample)

    def page(self, name: str, html: str) -> None:
        for logger in self.loggers:
            logger.page(self.progress.axes() | {"name": name, "html": html})

    def alert(self, finding: str, begins: bool, message: str) -> None:
        for logger in self.loggers:
            logger.alert(self.progress.axes() | {"finding": finding, "begins": begins, "message": message})

    def flush(self) -> None:
        """Flush the run folder's records to the disk: a checkpoint must not exist without the records before it."""
        for logger in self.loggers:
            if isinstance(logger, RunFolder):
                logger.flush()

    def finish(self, exit_code: int) -> None:
        for logger in self.loggers:
            logger.finish(exit_code)


def open_loggers(
    config: RunConfig,
    folder: Path,
    checkpoint: Checkpoint | None,
    console: Console,
    parallel: Parallel,
    facts: dict[str, Any],
) -> list[Logger]:
    """The run folder first, then the console, then wandb.

    facts: the result of `checkpoint_facts`. Its "wandb_id" is filled in, so that a resumed run continues its wandb run.
    """
    run_folder = RunFolder(folder)
    run_folder.cut_after(checkpoint.step if checkpoint else -1)
    loggers: list[Logger] = [run_folder, console]
    mode, line = choose_wandb_mode(config.logger.wandb)
    console.say(line)
    facts["wandb_id"] = checkpoint.state.get("wandb_id") if checkpoint else None
    if mode != "disabled":
        known = plain_text(to_plain(config)) | derived_facts(config, parallel, facts)
        wandb = Wandb(
            config.logger, mode, Path(config.runs_dir), folder.name, config.model.name, facts["wandb_id"], known
        )
        loggers.append(wandb)
        facts["wandb_id"] = wandb.run_id
    return loggers


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
