"""Saves a run's checkpoints and assembles their `state.json`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from andrea.checkpoint import checkpoints_of, step_name
from andrea.checkpoint.find import own_figure
from andrea.checkpoint.model import own_parts
from andrea.config import RunConfig, to_plain
from andrea.runtime.files import storing
from andrea.runtime.system import rename
from andrea.text.corpus import Corpus
from andrea.training.health.health import Health
from andrea.training.optimizer import LossScale
from andrea.training.parallel.ranks import Ranks
from andrea.training.parallel.saver import Saver
from andrea.training.progress import Progress
from andrea.training.records.records import Records


@dataclass
class RunCheckpoints:
    """Saves the checkpoints of one run. facts: the result of `checkpoint_facts`, written to each state.json."""

    folder: Path  # of the run
    saver: Saver
    progress: Progress
    scale: LossScale
    health: Health
    records: Records
    facts: dict[str, Any]

    def __post_init__(self) -> None:
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

    def check(self) -> None:
        """Raises StorageFailed if a checkpoint could not be written in the background."""
        self.saver.check()

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

        Until the new one is on the disk, the old one lies beside it, whole, and gets its name back if writing fails.
        """
        path, aside = self.path, self.path.with_name(f"aside-{self.path.name}-evaluated-later")
        ranks = self.saver.parallel.ranks

        def move(source: Path, target: Path) -> None:
            with storing(path), contextlib.suppress(FileNotFoundError):  # a run that goes on in another folder has none
                rename(source, target)

        ranks.from_rank_0(lambda: move(path, aside))
        try:
            self.save()
            self.saver.wait()
        except BaseException:
            if ranks.is_rank_0 and not path.exists():
                move(aside, path)
            raise
        ranks.from_rank_0(lambda: shutil.rmtree(aside, ignore_errors=True))

    def save_if_finite(self) -> None:
        if not self.is_saved() and self.is_finite():
            self.save()

    def save_if_new(self) -> None:
        if not self.is_saved():
            self.save()


def checkpoint_facts(
    config: RunConfig, corpus: Corpus, ranks: Ranks, run_id: str, left_auto: list[str], groups: Mapping[str, str]
) -> dict[str, Any]:
    """Facts that each checkpoint records. A resumed run is compared with them. `open_loggers` adds wandb's run id."""
    return {
        "left_auto": left_auto,
        "groups": dict(groups),
        "run": run_id,
        "config": to_plain(config),
        "working_folder": os.getcwd(),  # relative paths in `config` mean this folder
        "data": corpus.fingerprint,
        "tokenizer": corpus.tokenizer.identity,
        "ranks": ranks.size,
        "own_parts": own_parts(config.model, config.attention),
        "wandb_id": None,
    }
