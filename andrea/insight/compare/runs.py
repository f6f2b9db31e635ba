"""Run folders, read: what of a run is compared, and what keeps two runs from being comparable.

Everything comes from `config.yaml`, `metrics.jsonl` and the newest checkpoint's `state.json` and header; no tensor is read.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.checkpoint import checkpoints_of
from andrea.config import RunConfig, UserError, with_current_keys
from andrea.training.records.logger import AXES
from andrea.training.records.run_folder import read_lines

# What differs between any two runs and says nothing about what was trained.
NOT_COMPARED = ("name", "runs_dir", "data_dir", "resume", "init_from", "dry_run", "logger", "threads")


class LeftOut(UserError):
    """The folder holds nothing to compare yet; the message says why."""


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it. Curves are records with step, tokens, flops, seconds and the figures."""

    name: str
    folder: Path
    config: dict[str, Any]
    checkpoint: Path  # the newest
    parameters: int
    fingerprint: str  # sha256 of tokenizer, tokens and weights of the data
    tokenizer: str  # its identity
    validation: list[dict[str, float]]  # val/loss in nats a token, val/bpb in bits a byte
    training: list[dict[str, float]]  # train/loss in nats a token
    step: int
    tokens: int
    flops: float
    seconds: float  # of training steps alone: compiling, evaluating and saving stand outside the clock
    tokens_per_second: float | None  # median of the records'
    mfu: float | None  # median, a share of the device's peak
    peak_memory_bytes: int | None

    @property
    def model(self) -> str:
        return self.config["model"]["name"]

    @property
    def loss(self) -> float:
        """The last validation loss, in nats a token."""
        return self.validation[-1]["val/loss"]

    @property
    def bpb(self) -> float:
        return self.validation[-1]["val/bpb"]

    @property
    def finished(self) -> bool:
        """Evaluated at the last step of its schedule: a loss before that is not what these tokens can reach."""
        return self.validation[-1]["step"] == self.config["train"]["steps"]

    @property
    def progress(self) -> str:
        """'' for a finished run, else how far it came, and how old its figures are."""
        if self.finished:
            return ""
        evaluated = self.validation[-1]["step"]
        behind = f", evaluated at {evaluated:,}" if evaluated < self.step else ""
        return f"at step {self.step:,} of {self.config['train']['steps']:,}{behind}"


def find_run_folders(paths: list[str]) -> list[Path]:
    """The run folders that the paths name: each is one, or a folder of some. Raises UserError for a path with none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; name run folders, or a folder that holds some (runs/)")
        inside = [path] if is_run(path) else sorted(child for child in path.iterdir() if is_run(child))
        if not inside:
            raise UserError(f"{path} holds no run: neither it nor a folder in it has a config.yaml; name a run folder")
        found += inside
    unique = {folder.resolve(): folder for folder in found}
    return list(unique.values())


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "config.yaml")  # False, too, where the folder is someone else's


def read_runs(folders: list[Path]) -> tuple[list[Run], list[str]]:
    """The runs, smallest first, and a line for each folder that was left out."""
    runs, left_out = [], []
    for folder, name in zip(folders, names_of(folders), strict=True):
        try:
            runs.append(read_run(folder, name))
        except LeftOut as reason:
            left_out.append(f"{name}: left out, {reason}")
    runs.sort(key=lambda run: (run.parameters, run.tokens, run.name))
    return runs, left_out


def names_of(folders: list[Path]) -> list[str]:
    """Folder names, with their parents' where two are alike."""
    short = [folder.resolve().name for folder in folders]
    return [
        f"{folder.resolve().parent.name}/{name}" if short.count(name) > 1 else name
        for folder, name in zip(folders, short, strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """Read one run folder, however far the run came. Raises LeftOut."""
    config = read_config(folder)
    records = [record for record in read_lines(folder / "metrics.jsonl") if isinstance(record, dict)]
    if not records:
        raise LeftOut("no record yet: it was stopped before the first, or has only begun")
    validation = curve(records, ("val/loss", "val/bpb"))
    if not validation:
        raise LeftOut(f"no evaluation yet, at step {records[-1].get('step', 0)}")
    saved = checkpoints_of(folder)
    if not saved:
        raise LeftOut("no checkpoint yet, which would say how large it is and on which data it trains")
    try:
        state = json.loads((saved[-1] / "state.json").read_text(encoding="utf-8"))
        fingerprint, tokenizer = str(state["data"]), str(state["tokenizer"])
        parameters = count_parameters(saved[-1] / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LeftOut(f"{saved[-1].name} cannot be read ({error})") from None
    last = records[-1]
    memory = values_of(records, "train/peak_memory_bytes")
    return Run(
        name=name,
        folder=folder,
        config=config,
        checkpoint=saved[-1],
        parameters=parameters,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        validation=validation,
        training=curve(records, ("train/loss",)),
        step=last["step"],
        tokens=last["tokens"],
        flops=last["flops"],
        seconds=last["seconds"],
        tokens_per_second=median(values_of(records, "train/tokens_per_second")),
        mfu=median(values_of(records, "train/mfu")),
        peak_memory_bytes=int(max(memory)) if memory else None,
    )


def read_config(folder: Path) -> dict[str, Any]:
    import yaml

    try:
        config = with_current_keys(RunConfig, yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        config["model"]["name"], config["train"]["steps"]  # noqa: B018 - what the rest relies on
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise LeftOut(f"config.yaml is not a run's ({error!r})") from None
    return config


def curve(records: list[dict[str, Any]], figures: tuple[str, ...]) -> list[dict[str, float]]:
    """The records that carry all the figures, the last one where a step has several."""
    by_step = {}
    for record in records:
        if all(is_number(record.get(key)) for key in ("step", *AXES, *figures)):
            by_step[record["step"]] = {key: record[key] for key in ("step", *AXES, *figures)}
    return list(by_step.values())


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def values_of(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if is_number(record.get(key))]


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def count_parameters(path: Path) -> int:
    """Numbers in a .safetensors file, by its header alone: 8 bytes of length, then JSON."""
    with open(path, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


# ---------------------------------------------------------------------------------------------- what is comparable


def warnings_of(runs: list[Run]) -> list[str]:
    """What keeps the figures of these runs from being compared, a line each."""
    lines = []
    tokenizers = groups(runs, lambda run: run.tokenizer)
    if len(tokenizers) > 1:
        lines.append(
            f"tokenizers differ ({in_words(tokenizers)}): loss is a token's and does not compare; bits per byte do, on equal text"
        )
    data = groups(runs, lambda run: run.fingerprint[:12])
    if len(data) > 1:
        named = {}
        for run in runs:
            named.setdefault(f"{data_words(run)} {run.fingerprint[:12]}", []).append(run.name)
        lines.append(
            f"data differ, and with them the validation set ({in_words(named)}): neither loss nor bits per byte compare"
        )
    measured = groups(runs, lambda run: shown(run.config["train"].get("eval_tokens")))
    if len(measured) > 1:
        lines.append(
            f"train.eval_tokens differs ({in_words(measured)}): evaluations on the way saw different parts of the "
            f"validation set; the last of a finished run saw all of it"
        )
    return lines


def data_words(run: Run) -> str:
    data = run.config.get("data", {})
    return data.get("path") or "+".join(data.get("sources") or {}) or data.get("kind", "data")


def groups(runs: list[Run], key) -> dict[str, list[str]]:
    """Names of runs by what `key` says of them."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run.name)
    return found


def in_words(named: dict[str, list[str]]) -> str:
    """'a: run, run; b: run', no more than three runs each by name."""

    def some(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    return "; ".join(f"{value}: {some(names)}" for value, names in named.items())


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each run, for the keys whose values differ; a key that a run lacks is '—' there."""
    flat = [dict(flatten(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = {key: [config.get(key, "—") for config in flat] for key in keys if key.split(".")[0] not in NOT_COMPARED}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def shown(value: Any) -> str:
    """A value of the configuration as the command line takes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def flatten(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found += flatten(value, f"{prefix}{key}.")
        else:
            found.append((prefix + str(key), value))
    return found
