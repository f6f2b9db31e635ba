"""Reads the speed of earlier runs, to predict the time of a run that has not started."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from andrea.checkpoint import checkpoints_of
from andrea.checkpoint.folder import read_small_json
from andrea.runtime.device import choose_device
from andrea.training.records.run_folder import read_lines


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
        if not checkpoints_of(folder):
            continue
        try:
            state = read_small_json(checkpoints_of(folder)[-1] / "state.json")
            same_mode = mode_of(state["config"]) == mode and state.get("ranks", 1) == 1
            per_token = state["flops"] / state["tokens"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ZeroDivisionError):
            continue  # damaged, or of a device that this machine lacks
        if same_mode and per_token > 0:
            distance = abs(math.log(per_token / flops_per_token))
            found.append((distance, -folder.stat().st_mtime, folder, per_token))
    for _, _, folder, per_token in sorted(found):
        records = read_lines(folder / "metrics.jsonl")
        paces = [record["train/tokens_per_second"] for record in records if "train/tokens_per_second" in record]
        if paces:
            return Pace(statistics.median(paces) * per_token, folder.name, per_token)
    return None


def mode_of(config: dict[str, Any]) -> Mode:
    """The mode of a run, from its saved configuration, where `device` may be auto."""
    return Mode(choose_device(config["device"]).type, config["precision"], config["compile"])
