"""The comparison as one HTML file that holds its data, style and script, and loads nothing from a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from andrea.config import as_typed
from andrea.config.keys import flatten
from andrea.insight.compare.comparison import Comparison, LineStyle
from andrea.insight.compare.runs import Run
from andrea.insight.html import fill_template, json_for_script
from andrea.training.records import AXES
from andrea.training.records.console import format_number
from andrea.training.records.run_folder import is_number

TEMPLATE = Path(__file__).parent / "template.html"
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
        **(
            one_run_data(comparison.runs[0])
            if len(comparison.runs) == 1
            else {"samples": [], "measured_heads": [], "settings": []}
        ),
        "warnings": comparison.warnings,
        "notes": [*comparison.notes, *comparison.left_out],
        "heads": [["run", ""], *([column.title, column.unit] for column in comparison.columns)],
        "rows": comparison.rows,
        "scaling": comparison.scaling,
        "differences": comparison.difference_rows,
        "runs": [run_data(run, style) for run, style in zip(comparison.runs, comparison.styles, strict=True)],
    }


def one_run_data(run: Run | None) -> dict[str, Any]:
    """The data shown for a single run besides its curves: the last samples, newest first, its heads over time, its settings."""
    if run is None:
        return {"samples": [], "measured_heads": [], "settings": []}
    stride = -(-len(run.heads) // MOST_MEASUREMENTS) or 1
    shown = run.samples[-MOST_SAMPLES:][::-1]
    return {
        "samples": [
            {
                "step": sample["step"] if is_number(sample.get("step")) else None,
                "prompt": sample["prompt"],
                "text": sample["text"],
            }
            for sample in shown
        ],
        "earlier_samples": len(run.samples) - len(shown),
        "measured_heads": run.heads[::-1][::stride][::-1],  # with the last measurement
        "settings": [[key, as_typed(value)] for key, value in flatten(run.config).items()],
    }


def run_data(run: Run, style: LineStyle) -> dict[str, Any]:
    """The data of one run's line in the charts."""
    stride = -(-len(run.training) // MOST_TRAINING_POINTS) or 1
    return dataclasses.asdict(style) | {
        "name": run.name,
        "size": f"{run.model}, {format_number(run.parameters)}, {format_number(run.tokens)} tokens",
        "validation": [
            {key: point[key] for key in ("step", *AXES)}
            | {"loss": point["val/loss"], "bpb": point["val/bpb"]}
            | {key: point[f"expected/{name}"] for key, name in EXPECTED.items() if f"expected/{name}" in point}
            for point in run.validation
        ],
        "training": [
            {key: point[key] for key in AXES} | {"loss": point["train/loss"]} for point in run.training[::stride]
        ],
    }
