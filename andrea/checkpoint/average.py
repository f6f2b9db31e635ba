"""The mean of the weights of several checkpoints of one model (Izmailov et al. 2018, arXiv 1803.05407), as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from andrea.checkpoint.errors import Damaged
from andrea.checkpoint.find import checkpoints_of, locate
from andrea.checkpoint.folder import Checkpoint, read_checkpoint, write_weights
from andrea.config import AverageConfig, UserError

UNKNOWN = ("val_loss", "val_bpb", "best_bpb", "compared_bpb", "evaluated_step")  # fields of state.json


def average(config: AverageConfig) -> tuple[Path, list[Checkpoint]]:
    """Write the mean of the weights of config.checkpoints, and return its folder and the checkpoints, oldest first.

    Raises UserError if there are fewer than two checkpoints, if their models differ, or if the folder exists.
    """
    sources = sources_of(config)
    newest = sources[-1]
    check_same_model(sources)
    run = newest.path.parents[1] if newest.path.parent.name == "checkpoints" else newest.path
    folder = Path(config.out) if config.out else Path(config.runs_dir) / f"{run.name}-average"
    if folder.exists():
        raise UserError(f"{folder} exists; remove it, or name another folder with out=…")
    mean = {name: tensor.double() / len(sources) for name, tensor in newest.result_tensors().items()}
    for source in sources[:-1]:
        for name, tensor in source.result_tensors().items():
            mean[name] += tensor.double() / len(sources)
    state = newest.state | dict.fromkeys(UNKNOWN) | {"run": None, "average_of": [str(each.path) for each in sources]}
    write_weights(folder, state, {name: tensor.to(torch.float32) for name, tensor in mean.items()}, newest.tokenizer())
    return folder, sources


def sources_of(config: AverageConfig) -> list[Checkpoint]:
    """The checkpoints that config.checkpoints names, oldest first: of a run, its newest config.last ones."""
    found: dict[Path, Checkpoint] = {}
    for requested in config.checkpoints or [None]:
        named = locate(requested, Path(config.runs_dir), key="checkpoints", newest=True)
        run = named.path.parents[1]
        is_run = requested is None or Path(requested).name in (run.name, "checkpoints")
        paths = checkpoints_of(run)[-config.last :] if is_run else [named.path]
        found |= {path.resolve(): read_checkpoint(path) for path in paths}
    if len(found) < 2:
        raise UserError(
            f"an average needs at least two checkpoints, found only {', '.join(map(str, found))}; name several with "
            f"checkpoints=[A,B], or train with a larger train.keep"
        )
    return sorted(found.values(), key=lambda checkpoint: checkpoint.step)


def check_same_model(checkpoints: list[Checkpoint]) -> None:
    """Raises UserError if the checkpoints do not hold weights of one model and one tokenizer."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        same = all(first.state["config"].get(key) == other.state["config"].get(key) for key in ("model", "attention"))
        if not same or first.state.get("tokenizer") != other.state.get("tokenizer"):
            raise UserError(
                f"{first.path} and {other.path} are checkpoints of different models; average those of one run"
            )
        shapes = (each.open_tensors(with_optimizer=False).shapes for each in (first, other))
        if len({tuple(sorted((name, s) for name, s in each.items() if "/" not in name)) for each in shapes}) > 1:
            raise Damaged(
                f"{first.path} and {other.path} hold weights of other names or shapes; use an older checkpoint"
            )
