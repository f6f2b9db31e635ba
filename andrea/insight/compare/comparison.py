"""Computes everything that the terminal, the page and the picture show about the compared runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from andrea.config import ModelConfig, as_typed
from andrea.insight.compare.differences import comparability_warnings, data_name, differences
from andrea.insight.compare.line_styles import LineStyle, line_styles
from andrea.insight.compare.runs import Run
from andrea.insight.compare.scaling.fit import count
from andrea.insight.compare.scaling.report import scaling_lines, target_of
from andrea.insight.compare.table import Column, make_table
from andrea.training.records.format import format_number


@dataclass(frozen=True)
class Comparison:
    """The compared runs, smallest model first, and the results of the comparison."""

    runs: list[Run]
    styles: list[LineStyle]  # of each run
    columns: list[Column]  # of the table, without the run's name
    rows: list[list[str]]  # of the table, with the run's name first
    left_out: list[str]  # one line for each folder that could not be compared
    warnings: list[str]
    scaling: list[str]  # lines of text
    differing: dict[str, list[Any]]  # configuration key -> its value in each run

    @property
    def summary(self) -> str:
        if len(self.runs) == 1:
            run = self.runs[0]
            state = "finished" if run.finished else run.progress
            return (
                f"{run.model}, {format_number(run.parameters)} parameters, {format_number(run.tokens)} tokens of "
                f"{data_name(run.config)} · {state}"
            )
        smallest, largest = (format_number(run.parameters) for run in (self.runs[0], self.runs[-1]))
        sizes = f"of {smallest}" if smallest == largest else f"from {smallest} to {largest}"
        return f"{count(len(self.runs), 'run')}, {sizes} parameters"

    @property
    def notes(self) -> list[str]:
        """Lines on unfinished runs, which the table marks with '*', and on runs whose best evaluation is not the last."""
        return (
            [f"* {run.name}: {run.progress}" for run in self.runs if not run.finished]
            + [
                f"{run.name}: the figures are of step {run.result['step']:,}, the best evaluation; the last evaluation, at "
                f"step {run.validation[-1]['step']:,}, has {run.validation[-1]['val/bpb']:.4f} bits per byte"
                for run in self.runs
                if run.result["step"] != run.validation[-1]["step"]
            ]
            + self.best
            + self.judged
        )

    @property
    def judged(self) -> list[str]:
        """One line for each figure of `andrea evaluate`, with its value in each run that was judged in this way."""
        found: dict[str, list[str]] = {}
        for run in self.runs:
            for step, figure in run.judged.values():
                other_step = "" if step == run.result["step"] else f" at step {step:,}"
                guessed = "" if figure.chance is None else f", chance {figure.chance:.3f}"
                what = f"{figure.task} {figure.metric} ({figure.about or f'{figure.n:,} questions'}{guessed})"
                found.setdefault(what, []).append(f"{run.name} {figure.text}{other_step}")
        return [f"{what}: {'; '.join(values)}" for what, values in sorted(found.items())]

    @property
    def best(self) -> list[str]:
        """A line that names the run with the fewest bits per byte; none if there is one run, or if the texts differ."""
        if len(self.runs) == 1 or len({run.checkpoint.fingerprint for run in self.runs}) > 1:
            return []
        best = min(self.runs, key=lambda run: run.bpb)
        return [f"fewest bits per byte: {best.name}, {best.bpb:.4f}"]

    @property
    def difference_rows(self) -> list[list[str]]:
        """One row for each configuration key that differs: the key, and its value in each run."""
        return [[key, *map(as_typed, values)] for key, values in self.differing.items()]


def compare_runs(
    runs: list[Run], left_out: list[str], predicted: ModelConfig | None, predict_tokens: int | None, seed: int
) -> Comparison:
    """Compare runs (at least one, smallest first). predicted: a model whose loss the scaling fit will predict."""
    columns, cells = make_table(runs)
    target = target_of(predicted, predict_tokens, largest=runs[-1]) if predicted else None
    return Comparison(
        runs=runs,
        styles=line_styles(runs),
        columns=columns,
        rows=[[run.name + ("" if run.finished else " *"), *row] for run, row in zip(runs, cells, strict=True)],
        left_out=left_out,
        warnings=comparability_warnings(runs),
        scaling=scaling_lines(runs, target, seed) if len(runs) > 1 or target else [],
        differing=differences(runs),
    )
