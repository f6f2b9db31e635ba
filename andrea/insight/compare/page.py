"""What the comparison shows: the command `python -m andrea compare RUN_DIR… [key=value …]`, its page, and a run's `run.html`.

The page is one HTML file that holds its data, style and script, and loads nothing from a network.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from andrea.config import CompareConfig, ModelConfig, UserError, as_typed
from andrea.config.keys import flatten
from andrea.insight.compare.births import birth_lines, births_data
from andrea.insight.compare.comparison import Comparison, compare_runs, difference_lines, line_style, terminal_table
from andrea.insight.compare.runs import Run, find_run_folders, read_runs
from andrea.insight.html import fill_template, json_for_script
from andrea.insight.lens.scores import NAMES
from andrea.runtime.files import replace_text, storing
from andrea.runtime.own_parts import allowing
from andrea.runtime.streams import at_words, printable
from andrea.training.records import AXES
from andrea.training.records.console import format_number
from andrea.training.records.run_folder import is_number

# ---------------------------------------------------------------------------------------------------------- the command

LEAST_WIDTH, USUAL_WIDTH = 80, 100  # characters of the terminal's lines


def compare(config: CompareConfig, predicted: ModelConfig | None, say: Callable[[str], None] = print) -> int:
    """Compare the runs of config.runs; `say` takes each line of text. Returns the exit code.

    predicted: the model of config.predict. Raises UserError if no folder can be compared, StorageFailed if writing
    fails.
    """
    runs, left_out = read_runs(find_run_folders(config.runs, config.runs_dir))
    for line in left_out:
        say(printable(line))
    if not runs:
        raise UserError("nothing to compare: every run was left out; train until the first evaluation and checkpoint")
    with allowing((), config.trust):
        comparison = compare_runs(runs, left_out, predicted, config.predict_tokens, config.seed)
    for line in terminal_lines(comparison):
        say(line)

    page = Path(config.out)
    with storing(page, of_run=False):
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_text(page, render_page(comparison))
    say(f"written: {page}")
    return 0


def terminal_lines(comparison: Comparison) -> list[str]:
    """The comparison as lines of text for a terminal."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((USUAL_WIDTH, 24)).columns)
    heads = ["run", *(column.title for column in comparison.columns)]
    lines = list(comparison.notes)
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    lines += birth_lines(comparison.runs)
    lines += comparison.scaling
    if comparison.differing:
        lines.append("configuration keys that differ:")
        lines += [f"  {line}" for line in difference_lines(comparison.differing)]
    return [terminal_table(heads, comparison.rows, width), *(at_words(printable(line)) for line in lines)]


# ------------------------------------------------------------------------------------------------------------- the page

TEMPLATE = Path(__file__).parent / "web" / "template.html"
MOST_TRAINING_POINTS = 400  # of each run's training curve
EXPECTED = {"expected": "bpb", "spread": "spread_bpb"}  # figures of a run with an expected curve
MOST_SAMPLES, MOST_MEASUREMENTS = 12, 40  # shown of a single run


def render_page(comparison: Comparison, lenses: Sequence[str] = ()) -> str:
    """The HTML text of the page. lenses: addresses of a single run's lens pages, the oldest first."""
    return fill_template(TEMPLATE, {"DATA": json_for_script(page_data(comparison) | {"lenses": lenses})})


def page_data(comparison: Comparison) -> dict[str, Any]:
    """The data that the page's script reads."""
    return {
        "title": "Comparison of runs" if len(comparison.runs) > 1 else f"Run {comparison.runs[0].name}",
        "summary": comparison.summary,
        "samples": [],
        "measured_heads": [],
        "settings": [],
        **(one_run_data(comparison.runs[0]) if len(comparison.runs) == 1 else {}),
        "warnings": comparison.warnings,
        "notes": [*comparison.notes, *comparison.left_out],
        "heads": [["run", ""], *([column.title, column.unit] for column in comparison.columns)],
        "rows": comparison.rows,
        "scaling": comparison.scaling,
        "patterns": [{key: getattr(name, key) for key in ("score", "title", "meaning", "threshold")} for name in NAMES],
        "differences": [[key, *map(as_typed, values)] for key, values in comparison.differing.items()],
        "runs": [run_data(run) | line_style(comparison.runs, index) for index, run in enumerate(comparison.runs)],
    }


def one_run_data(run: Run) -> dict[str, Any]:
    """The data shown for a single run besides its curves: the last samples, newest first, its heads over time, its settings."""
    stride = -(-len(run.heads) // MOST_MEASUREMENTS) or 1
    shown = run.samples[-MOST_SAMPLES:][::-1]
    return {
        "samples": [
            {"step": each["step"] if is_number(each.get("step")) else None}
            | {key: each[key] for key in ("prompt", "text")}
            for each in shown
        ],
        "earlier_samples": len(run.samples) - len(shown),
        "measured_heads": run.heads[::-1][::stride][::-1],  # with the last measurement
        "settings": [[key, as_typed(value)] for key, value in flatten(run.config).items()],
    }


def run_data(run: Run) -> dict[str, Any]:
    """The data of one run's line in the charts."""
    stride = -(-len(run.training) // MOST_TRAINING_POINTS) or 1
    return {
        "name": run.name,
        "size": f"{run.config['model']['name']}, {format_number(run.parameters)}, {format_number(run.tokens)} tokens",
        "validation": [
            {key: point[key] for key in ("step", *AXES)}
            | {"loss": point["val/loss"], "bpb": point["val/bpb"]}
            | {key: point[f"expected/{name}"] for key, name in EXPECTED.items() if f"expected/{name}" in point}
            for point in run.validation
        ],
        "training": [
            {key: point[key] for key in AXES} | {"loss": point["train/loss"]} for point in run.training[::stride]
        ],
        "births": births_data(run),
        "sizes": run.sizes,
    }


# ------------------------------------------------------------------------------------------------------- a run's own page
# `run.html` in the folder of a run: its curves, heads, samples and settings. Made again at each evaluation.
#
# It is the page that `python -m andrea compare runs/NAME` writes, with links to the run's lens pages. Training gets the
# class as an argument, as one of its loggers.
