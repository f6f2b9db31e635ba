"""Reads the speed of earlier runs, to predict the time of a run that has not started."""

from __future__ import annotations

from pathlib import Path

from andrea.checkpoint import checkpoints_of
from andrea.checkpoint.folder import read_small_json
from andrea.training.records.run_folder import read_lines


def measured_pace(runs_dir: Path, model_name: str) -> tuple[float, str] | None:
    """Median tokens per second and name of the newest run of this model, or None if there is no such run."""
    for folder in sorted(Path(runs_dir).glob("*/"), key=lambda path: path.stat().st_mtime, reverse=True):
        if not checkpoints_of(folder):
            continue
        try:
            state = read_small_json(checkpoints_of(folder)[-1] / "state.json")
            same_model = state["config"]["model"]["name"] == model_name
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged: reported on resume
            continue
        if not same_model:
            continue
        paces = [
            r["train/tokens_per_second"] for r in read_lines(folder / "metrics.jsonl") if "train/tokens_per_second" in r
        ]
        if paces:
            return sorted(paces)[len(paces) // 2], folder.name
    return None
