"""Reads run folders for the comparison.

All figures come from `config.yaml`, `metrics.jsonl` and the newest checkpoint's `state.json` and file headers. No tensor is
read.
"""

import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.checkpoint import Damaged, checkpoints_of, step_of
from andrea.checkpoint.folder import SHARDS, read_small_json
from andrea.checkpoint.tensors import TensorReader
from andrea.config import RunConfig, UserError, nearest, with_current_keys
from andrea.config.schema import NOT_RUNS
from andrea.evaluation.results import TEXT_METRIC, Judged, read_figures
from andrea.runtime.files import UNFINISHED, StorageFailed
from andrea.training.records import AXES
from andrea.training.records.run_folder import is_number, load_config, read_records, values_of

HEADS, IN_CONTEXT = "attention/heads/", "attention/in_context_nats"
OF_RESULTS = ("val/compared_bpb", "val/tokens")  # figures that `result_of` reads where an evaluation has them
Curve = list[dict[str, float]]  # records of one run, each with step, tokens, flops, seconds and some measured figures


class LeftOut(UserError):
    """The folder cannot be compared yet; the message says why."""


@dataclass(frozen=True)
class Run:
    """One run as read from its folder. A figure of speed or memory is None if the run did not record it."""

    name: str
    config: dict[str, Any]
    checkpoint: Path  # the newest one
    parameters: int
    fingerprint: str  # sha256 of tokenizer, tokens and weights of the data
    tokenizer: str  # its identity
    step: int  # this and the next three: of the last record
    tokens: int
    flops: float
    seconds: float  # of the training steps, without compilation, evaluation and saving
    tokens_per_second: float | None  # median over the records
    mfu: float | None  # model FLOPs utilisation: median share of the device's peak
    peak_memory_bytes: int | None
    result: dict[str, float]  # the record of the evaluation that counts as the run's result
    loss: float  # of the result, in nats per token
    bpb: float  # of the result, in bits per byte
    validation: Curve  # with val/loss in nats per token, val/bpb in bits per byte
    training: Curve  # with train/loss in nats per token
    heads: list[dict[str, Any]]  # records with the figures of single heads, attention/heads/…
    samples: list[dict[str, Any]]  # texts written in training: step, prompt and text
    judged: Judged  # the figures of `andrea evaluate`
    damaged: list[str]  # one line for each file with damaged lines

    @property
    def finished(self) -> bool:
        """Whether the run was evaluated at the last step of its schedule, after its learning rate has decayed."""
        return self.validation[-1]["step"] == self.config["train"]["steps"]

    @property
    def is_of_whole_text(self) -> bool:
        """Whether the result is not of an evaluation that had no time to read all that it was meant to."""
        return "val/tokens" not in self.result

    @property
    def progress(self) -> str:
        """'' for a finished run, else its step, and the step of its last evaluation if that is earlier."""
        if self.finished:
            return ""
        evaluated = self.validation[-1]["step"]
        behind = f", last evaluated at step {evaluated:,}" if evaluated < self.step else ""
        return f"at step {self.step:,} of {self.config['train']['steps']:,}{behind}"

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Bits per byte by the number of bytes of the weights, the fewest first: of the text that `andrea evaluate` has read
        in most precisions. Without such figures, of the run's result, in fp32.
        """
        by_text: dict[tuple, list[dict[str, Any]]] = {}
        for step, figure in self.judged.values():
            if figure.metric == TEXT_METRIC and figure.n_byte > 0 and is_number(figure.value):
                point = {"bytes": figure.n_byte, "bpb": figure.value, "precision": figure.precision, "step": step}
                text = figure.task, figure.n, figure.about  # tasks of lm-eval have no `about`
                by_text.setdefault(text, []).append(point | {"text": figure.about or figure.task})
        of_result = {"bytes": 4 * self.parameters, "bpb": self.bpb, "precision": "fp32", "step": self.result["step"]}
        found = max(by_text.values(), key=len, default=[of_result | {"text": "the run's result"}])
        return sorted(found, key=lambda point: point["bytes"])


def find_run_folders(paths: list[str], runs_dir: str = "runs") -> list[Path]:
    """The run folders among `paths` and directly inside `paths`, each once. A path may be a run's name in `runs_dir`.

    Raises UserError for a path without a run.
    """
    found: list[Path] = []
    for typed in paths:
        if len(paths) > 1 and Path(typed).name in NOT_RUNS:  # a glob such as runs/* names them too
            continue
        places = [path for path in (Path(typed), Path(runs_dir) / typed) if path.is_dir()]
        if not places:
            names = [child.name for child in runs_inside(Path(runs_dir))]
            raise UserError(
                f"{typed} is neither a folder nor a run under runs_dir={runs_dir}; name runs, or a folder that "
                f"contains runs (runs/){nearest(typed, names)}"
            )
        # A run may have the name of another folder here, such as that of its text.
        inside = next(filter(None, ([path] if is_run(path) else runs_inside(path) for path in places)), None)
        if inside is None:
            raise UserError(
                f"{places[0]} holds no run: neither it nor a folder in it has a config.yaml; name a run folder"
            )
        found += inside
    unique = {folder.resolve(): folder for folder in found}
    return list(unique.values())


def runs_inside(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if is_run(child)) if folder.is_dir() else []


def is_run(folder: Path) -> bool:
    """Whether it holds a run's configuration. False, without an error, for a folder that may not be read."""
    return not folder.name.startswith(UNFINISHED) and os.path.isfile(folder / "config.yaml")  # UNFINISHED: half deleted


def read_runs(folders: list[Path]) -> tuple[list[Run], list[str]]:
    """Returns the runs, smallest model first, and one line for each folder, or file's damaged lines, left out."""
    runs, left_out = [], []
    for folder, name in zip(folders, unique_names(folders), strict=True):
        try:
            runs.append(read_run(folder, name))
            left_out += [f"{name}: {line}" for line in runs[-1].damaged]
        except LeftOut as reason:
            left_out.append(f"{name}: left out, {reason}")
    runs.sort(key=lambda run: (run.parameters, run.tokens, run.name))
    return runs, left_out


def unique_names(folders: list[Path]) -> list[str]:
    """The folders' names. Equal names are preceded by the names of as many folders above as they need to differ.

    folders: no two are the same.
    """
    paths, names = [folder.resolve() for folder in folders], []
    for path in paths:
        n_part = 1
        while sum(other.parts[-n_part:] == path.parts[-n_part:] for other in paths) > 1:
            n_part += 1
        names.append("/".join(path.parts[-n_part:]))
    return names


def read_run(folder: Path, name: str) -> Run:
    """Read the folder of a finished or unfinished run. Raises LeftOut."""
    config = read_config(folder)
    try:
        metrics, samples = (read_records(folder / name) for name in ("metrics.jsonl", "samples.jsonl"))
    except StorageFailed as error:
        raise LeftOut(str(error)) from None
    records, damaged = metrics.records, [each.complaint for each in (metrics, samples) if each.damaged]
    if damaged and not records:
        raise LeftOut("; ".join(damaged))
    if not records:
        raise LeftOut("no record yet: the run has only started, or was stopped before its first record")
    validation = curve(records, ("val/loss", "val/bpb"), (*OF_RESULTS, "expected/bpb", "expected/spread_bpb"))
    if not validation:
        raise LeftOut(f"no evaluation yet, at step {records[-1]['step']}")
    facts = checkpoint_facts(folder)
    result, memory = result_of(validation, folder), values_of(records, "train/peak_memory_bytes")
    try:
        judged = read_figures(folder)
    except OSError:
        judged = {}
    return Run(
        name=name,
        config=config,
        **facts,
        **last_of(records),
        tokens_per_second=median(values_of(records, "train/tokens_per_second")),
        mfu=median(values_of(records, "train/mfu")),
        peak_memory_bytes=int(max(memory)) if memory else None,
        result=result,
        loss=result["val/loss"],
        bpb=result["val/bpb"],
        validation=validation,
        training=curve(records, ("train/loss",)),
        heads=head_records(records),
        samples=samples.records,
        judged=judged,
        damaged=damaged,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The run's configuration; the keys that are always read are present and have the right types. Raises LeftOut."""
    try:
        config = with_current_keys(RunConfig, load_config(folder))
        for group, key, kind in (("model", "name", str), ("train", "steps", int), ("data", "kind", str)):
            if not isinstance(config[group][key], kind) or (kind is int and not is_number(config[group][key])):
                raise ValueError(f"{group}.{key} has a wrong value")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LeftOut(f"config.yaml cannot be read as the configuration of a run ({error!r})") from None
    return config


def last_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """step and the AXES of the last record that has them. Raises LeftOut."""
    for record in reversed(records):
        axes = axes_of(record)
        if axes is not None and min(axes.values()) >= 0:
            return axes
    raise LeftOut(f"no record has step, {', '.join(AXES)}")


def axes_of(record: dict[str, Any]) -> dict[str, float] | None:
    """step and the AXES of a record; None if it lacks one of them."""
    axes = {key: record.get(key) for key in ("step", *AXES)}
    return axes if all(map(is_number, axes.values())) else None


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """What `Run` holds of the newest checkpoint. Raises LeftOut."""
    try:
        saved = checkpoints_of(folder)
    except StorageFailed as error:
        raise LeftOut(str(error)) from None
    if not saved:
        raise LeftOut("no checkpoint yet; the model's size and the identity of its data are read from a checkpoint")
    newest = saved[-1]
    try:
        state = read_small_json(newest / "state.json")
        facts = {"fingerprint": str(state["data"]), "tokenizer": str(state["tokenizer"])}
        return facts | {"checkpoint": newest, "parameters": stored_numbers(newest)}
    except (OSError, ValueError, KeyError, TypeError) as error:  # Damaged is a ValueError
        raise LeftOut(f"{newest.name} cannot be read ({error})") from None


def stored_numbers(checkpoint: Path) -> int:
    """The number of weights in a checkpoint, from the headers of its files. Raises Damaged.

    While a sharded run goes on, each of several files holds some rows of each tensor.
    """
    whole = checkpoint / "model.safetensors"
    paths = [whole] if os.path.lexists(whole) else sorted((checkpoint / SHARDS).glob("*.safetensors")) or [whole]
    for path in paths:
        if not path.is_file():  # opening a pipe would wait for ever
            raise Damaged(f"{path} is missing, or is not a regular file")
    return sum(math.prod(shape) for name, shape in TensorReader(paths).shapes.items() if "/" not in name)


def curve(records: list[dict[str, Any]], figures: tuple[str, ...], optional: tuple[str, ...] = ()) -> Curve:
    """The records that have all the figures. If a step has several such records, the last one is used.

    optional: figures that are included where a record has them. The record of the run's end (key `event`) is left out: it
    repeats the figures of the last evaluation, which may be of an earlier step.
    """
    by_step: dict[float, dict[str, float]] = {}
    for record in records:
        axes = axes_of(record)
        if "event" not in record and axes is not None and all(is_number(record.get(key)) for key in figures):
            found = {key: record[key] for key in (*figures, *optional) if is_number(record.get(key))}
            by_step[record["step"]] = axes | found
    return list(by_step.values())


def head_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each measurement of the heads: step, tokens, FLOPs, seconds, the tables (L, H) of the figures attention/heads/…,
    and the in-context score where the record has it.
    """
    found = []
    for record in records:
        tables = {key.removeprefix(HEADS): value for key, value in record.items() if key.startswith(HEADS)}
        tables = {name: table for name, table in tables.items() if is_table(table)}
        axes, score = axes_of(record), record.get(IN_CONTEXT)
        if tables and axes is not None:
            found.append(axes | ({"in_context_nats": score} if is_number(score) else {}) | {"tables": tables})
    return found


def is_table(value: Any) -> bool:
    """Whether the value is rows of equally many numbers, or None for a head without the figure."""
    if not (isinstance(value, list) and value and all(isinstance(row, list) for row in value)):
        return False
    same_length = len({len(row) for row in value}) == 1
    return same_length and all(number is None or is_number(number) for row in value for number in row)


def result_of(validation: Curve, run: Path) -> dict[str, float]:
    """The evaluation that counts as the result of a run: the best one of a checkpoint on the disk, which keeps the best.

    While validation improves, it is the last evaluation, as in `checkpoint.result_of`. Evaluations are
    compared on the same held-out tokens: by `val/compared_bpb` if it is recorded, else by `val/bpb`. validation: at least
    one evaluation. run: the folder. Raises StorageFailed.
    """
    last, steps = validation[-1], set(map(step_of, checkpoints_of(run)))
    if "val/tokens" in last:  # of a part of that text
        return last
    saved = [point for point in validation[:-1] if point["step"] in steps and "val/tokens" not in point]
    return min([last, *saved], key=lambda point: point.get("val/compared_bpb", point["val/bpb"]))


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
