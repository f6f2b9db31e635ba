"""Finds differences between the compared runs: configuration keys, and anything that makes figures incomparable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from andrea.config import as_typed
from andrea.config.keys import flatten
from andrea.insight.compare.runs import Run

# Configuration keys that do not affect training.
NOT_COMPARED = ("name", "runs_dir", "data_dir", "resume", "init_from", "dry_run", "logger", "threads")
MISSING = "—"  # stands for the value of a key that a run's configuration lacks
NAMES_SHOWN = 3


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Dotted configuration key -> its value in each run, for the keys whose values differ."""
    flat = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = {key: [config.get(key, MISSING) for config in flat] for key in keys if key.split(".")[0] not in NOT_COMPARED}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def comparability_warnings(runs: list[Run]) -> list[str]:
    """One line for each difference that makes figures of these runs incomparable."""
    lines = []
    tokenizers = group_names(runs, lambda run: run.checkpoint.tokenizer)
    if len(tokenizers) > 1:
        lines.append(
            f"tokenizers differ ({name_groups(tokenizers)}): loss per token is not comparable; "
            f"compare bits per byte, on the same text"
        )
    if len({run.checkpoint.fingerprint for run in runs}) > 1:
        data = group_names(runs, lambda run: f"{data_name(run.config)} {run.checkpoint.fingerprint[:12]}")
        lines.append(
            f"data differ, and so do the validation sets ({name_groups(data)}): neither loss nor bits per byte is comparable"
        )
    evaluated = group_names(runs, lambda run: as_typed(run.config["train"].get("eval_tokens")))
    if len(evaluated) > 1:
        lines.append(
            f"train.eval_tokens differs ({name_groups(evaluated)}): evaluations during training used different parts of the "
            f"validation set; the last evaluation of a finished run used the whole set"
        )
    return lines


def data_name(config: dict[str, Any]) -> str:
    """The path of the run's text, the names of its sources, or the kind of its data."""
    data = config["data"]
    sources = data.get("sources")
    return str(data.get("path") or "+".join(map(str, sources if isinstance(sources, dict) else ())) or data.get("kind"))


def group_names(runs: list[Run], key: Callable[[Run], str]) -> dict[str, list[str]]:
    """Group runs by the value of `key`: value -> names of the runs."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run.name)
    return found


def name_groups(groups: dict[str, list[str]]) -> str:
    """'value: run, run; value: run', with at most NAMES_SHOWN names for each value."""

    def shortened(names: list[str]) -> str:
        hidden = len(names) - NAMES_SHOWN
        return ", ".join(names[:NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")

    return "; ".join(f"{value}: {shortened(names)}" for value, names in groups.items())


def difference_lines(differing: dict[str, list[Any]]) -> list[str]:
    """One line for each key, with the number of runs that have each value."""
    lines = []
    for key, values in differing.items():
        texts = [as_typed(value) for value in values]
        counts = {text: texts.count(text) for text in dict.fromkeys(texts)}
        lines.append(f"{key}: " + ", ".join(text + (f" (×{n})" if n > 1 else "") for text, n in counts.items()))
    return lines
