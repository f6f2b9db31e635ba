"""Reads the speed of earlier runs, to predict the time of a run that has not started."""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from andrea.checkpoint import checkpoints_of
from andrea.checkpoint.folder import read_small_json
from andrea.runtime.device import choose_device
from andrea.runtime.files import StorageFailed
from andrea.training.records.record_file import read_lines, values_of


class Mode(NamedTuple):
    """The settings that decide how many FLOPs a second a machine computes."""

    device: str  # its type: cpu, cuda or mps
    precision: str
    compile: str


class Pace(NamedTuple):
    """The speed of an earlier run."""

    flops_per_second: float
    run: str  # name
    flops_per_token: float  # of its model


def measured_pace(runs_dir: Path, mode: Mode, flops_per_token: float) -> Pace | None:
    """The median speed of an earlier run of one process in the same mode; None if there is no such run.

    The run with the nearest number of FLOPs per token is chosen, because small layers compute fewer FLOPs a second than
    large layers. If several runs are equally near, the newest is chosen.
    """
    found = []
    for folder in Path(runs_dir).glob("*/"):
        try:
            state = read_small_json(checkpoints_of(folder)[-1] / "state.json")
            same_mode = mode_of(state["config"]) == mode and state.get("ranks", 1) == 1
            per_token = state["flops"] / state["tokens"]
        except (OSError, StorageFailed, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError):
            continue  # damaged, without a checkpoint, or of a device that this machine lacks
        if same_mode and per_token > 0:
            distance = abs(math.log(per_token / flops_per_token))
            found.append((distance, -folder.stat().st_mtime, folder, per_token))
    for _, _, folder, per_token in sorted(found):
        with suppress(StorageFailed):
            if not (paces := values_of(read_lines(folder / "metrics.jsonl"), "train/tokens_per_second")):
                continue
            return Pace(statistics.median(paces) * per_token, folder.name, per_token)
    return None


def mode_of(config: dict[str, Any]) -> Mode:
    """The mode of a run, from its saved configuration, where `device` may be auto."""
    return Mode(choose_device(config["device"]).type, config["precision"], config["compile"])
