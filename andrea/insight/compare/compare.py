"""Many runs, one answer: a page, a picture and a table, from run folders alone.

python -m andrea compare RUN_DIR… [out=compare.html] [predict=andrea-480m]
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from andrea.config import AttentionConfig, CompareConfig, ModelConfig, UserError, parse
from andrea.insight.compare.picture import draw_picture
from andrea.insight.compare.runs import Run, differences, find_run_folders, read_runs, shown, warnings_of
from andrea.insight.compare.scaling.fit import (
    CONFIDENCE,
    TESTED_FACTOR,
    Interval,
    NoFit,
    ScalingFit,
    count,
    fit_scaling,
)
from andrea.insight.compare.table import looks, table, terminal_table
from andrea.runtime.files import replace_text, storing
from andrea.text.tokenizer import load_tokenizer
from andrea.training.records.format import format_number

TRAINING_POINTS = 400  # at most, of each run's thin training curve in the page
# What may differ between runs of one recipe: a scaling law is about size and tokens, all else being equal.
SIZE_KEYS = ("name", "d_model", "n_layer", "n_head", "n_kv_head", "d_mlp", "recipe_steps", "recipe_tokens_per_step")
ONE_RECIPE = {f"model.{key}" for key in SIZE_KEYS} | {
    "seed",
    "device",
    "precision",
    "float8",
    "compile",
    "deterministic",
}
ONE_RECIPE |= {"attention.implementation"}


@dataclass(frozen=True)
class Asked:
    """The size whose loss is to be predicted."""

    name: str
    parameters: int
    tokens: int
    flops: float


def compare(config: CompareConfig, size_asked: ModelConfig | None, say: Callable[[str], None] = print) -> int:
    """Read the runs, print the table, write page and picture. Raises UserError where nothing can be compared."""
    runs, left_out = read_runs(find_run_folders(config.runs))
    for line in left_out:
        say(line)
    if not runs:
        raise UserError("nothing to compare: every run was left out; train until the first evaluation and checkpoint")
    columns, cells = table(runs)
    unfinished = [f"* {run.name}: {run.progress}" for run in runs if not run.finished]
    rows = [[run.name + ("" if run.finished else " *"), *row] for run, row in zip(runs, cells, strict=True)]
    warnings = warnings_of(runs)
    scaling = scaling_lines(runs, asked_size(config, size_asked, runs), config.seed)
    differing = [[key, *map(shown, values)] for key, values in differences(runs).items()]

    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    say(terminal_table(["run", *(column.title for column in columns)], rows, width))
    for line in [*unfinished, *(f"warning: {line}" for line in warnings)]:
        say(line)
    for line in scaling:
        say(line)
    if differing:
        say("configuration, what differs:")
        say("\n".join(f"  {line}" for line in difference_lines(differing)))

    page = Path(config.out)
    picture = page.with_suffix(".png")
    page.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "summary": summary_of(runs),
        "warnings": warnings,
        "notes": [*unfinished, *left_out],
        "heads": [["run", ""], *([column.title, column.unit] for column in columns)],
        "rows": rows,
        "scaling": scaling,
        "differences": differing,
        "runs": [of_page(run, dataclasses.asdict(look)) for run, look in zip(runs, looks(runs), strict=True)],
    }
    with storing(page):
        replace_text(page, page_of(content))
    draw_picture(picture, runs, looks(runs), *config.size_pixels)
    say(f"written: {page} and {picture}")
    return 0


def run_words(words: list[str]) -> list[str]:
    """The command line with each word that is a path, or no key=value, as runs=…: a path may hold an '='."""
    return [word if "=" in word and not os.path.exists(word) else f"runs={word}" for word in words]


# ------------------------------------------------------------------------------------------------------ scaling


def asked_size(config: CompareConfig, size: ModelConfig | None, runs: list[Run]) -> Asked | None:
    """The model of predict=…, with predict_tokens or as many tokens a parameter as the largest run had."""
    if size is None:
        return None
    from andrea.model.size import count_parameters, flops_per_token

    largest = runs[-1]
    attention = parse(AttentionConfig, largest.config["attention"], "attention")
    n_vocab = load_tokenizer(largest.checkpoint).n_vocab
    parameters = count_parameters(size, attention, n_vocab).total
    tokens = config.predict_tokens or round(parameters * largest.tokens / largest.parameters)
    return Asked(size.name, parameters, tokens, float(tokens * flops_per_token(size, attention, n_vocab)))


def scaling_lines(runs: list[Run], asked: Asked | None, seed: int) -> list[str]:
    """What the runs say about loss and size, in words; or why they say nothing."""
    finished = [run for run in runs if run.finished]
    if len({run.fingerprint for run in finished}) > 1:
        return ["no fit: the runs were trained on different data or with different tokenizers"]
    parameters, tokens, flops, loss = (
        np.array([getattr(run, name) for run in finished], dtype=float)
        for name in ("parameters", "tokens", "flops", "loss")
    )
    try:
        fit, why = fit_scaling(parameters, tokens, flops, loss, seed)
    except NoFit as reason:
        return [str(reason)]
    lines = [f"scaling fit, {why}", law_words(fit)]
    if len(finished) < len(runs):
        lines.append(f"unfinished runs are not in the fit: {', '.join(run.name for run in runs if not run.finished)}")
    other = [key for key in differences(finished) if key not in ONE_RECIPE and not key.startswith("train.")]
    if other:
        lines.append(f"caution: the law is of one recipe, and these runs differ in {', '.join(other)}")
    if asked:
        lines.append(prediction_words(fit, asked, finished[-1]))
    return lines


def law_words(fit: ScalingFit) -> str:
    letters = {"N": ("A", "alpha"), "D": ("B", "beta"), "C": ("K", "gamma")}
    law = " + ".join(["E", *(f"{letters[name][0]}/{name}^{letters[name][1]}" for name in fit.names)])
    figures = [f"E = {fit.irreducible} nats a token"]
    for name in fit.names:
        numerator, exponent = letters[name]
        figures.append(
            f"{exponent} = {fit.exponent(name)} with {numerator} = {format_number(float(f'{fit.scale(name):.0e}'))}"
        )
    return f"loss = {law}: {', '.join(figures)}; {CONFIDENCE:.0%} intervals; one run's noise {fit.noise:.1%}"


def prediction_words(fit: ScalingFit, asked: Asked, run: Run) -> str:
    """The predicted loss with its interval, in nats and bits a byte, and how far beyond the runs it lies."""
    values = (asked.parameters, asked.tokens) if fit.names == ("N", "D") else (asked.flops,)
    nats = fit.predict(*values)
    per_nat = run.bpb / run.loss  # the validation set is the same: its bytes a token are
    bits = Interval(*(per_nat * number for number in (nats.value, nats.low, nats.high)))
    factors = fit.extrapolation(*values)
    words = {"N": "the parameters", "D": "the tokens", "C": "the FLOPs"}
    reach = ", ".join(f"{factor:.3g} times {words[name]}" for name, factor in factors.items())
    limit = TESTED_FACTOR if fit.names == ("N", "D") else TESTED_FACTOR**2
    beyond = max(factors.values()) > 1.01 * limit
    return (
        f"predicted for {asked.name}, {asked.parameters:,} parameters on {format_number(asked.tokens)} tokens: loss {nats} nats a "
        f"token, {bits} bits a byte ({CONFIDENCE:.0%} interval of the mean over seeds); that is {reach} of the largest run"
        + (f", and intervals were only ever tested to {limit:g} times: take it as a guess" if beyond else "")
    )


# ------------------------------------------------------------------------------------------------------ the page


def difference_lines(rows: list[list[str]]) -> list[str]:
    """A key a line, with the number of runs that have each value."""
    lines = []
    for key, *values in rows:
        counts = {value: values.count(value) for value in dict.fromkeys(values)}
        lines.append(f"{key}: " + ", ".join(f"{value}" + (f" (×{n})" if n > 1 else "") for value, n in counts.items()))
    return lines


def summary_of(runs: list[Run]) -> str:
    smallest, largest = (format_number(run.parameters) for run in (runs[0], runs[-1]))
    return f"{count(len(runs), 'run')}, from {smallest} to {largest} parameters"


def of_page(run: Run, look: dict[str, str]) -> dict[str, Any]:
    stride = -(-len(run.training) // TRAINING_POINTS) or 1
    axes = ("tokens", "flops", "seconds")
    return look | {
        "name": run.name,
        "size": f"{run.model}, {format_number(run.parameters)}, {format_number(run.tokens)} tokens",
        "validation": [
            {key: point[key] for key in ("step", *axes)} | {"loss": point["val/loss"], "bpb": point["val/bpb"]}
            for point in run.validation
        ],
        "training": [
            {key: point[key] for key in axes} | {"loss": point["train/loss"]} for point in run.training[::stride]
        ],
    }


def page_of(content: dict[str, Any]) -> str:
    template = (Path(__file__).parent / "page" / "template.html").read_text(encoding="utf-8")
    # '<' as an escape: no name of a run can end the script element it stands in
    return template.replace("@DATA@", json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"))
