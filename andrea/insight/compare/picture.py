"""The comparison as a PNG: validation loss and bits per byte against tokens, FLOPs and seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from andrea.insight.compare.comparison import LineStyle, shorten_names
from andrea.insight.compare.runs import Run
from andrea.runtime.files import replacing, storing
from andrea.runtime.streams import printable
from andrea.training.records.format import format_number

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

DOTS_PER_INCH = 100
AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training steps"}
METRICS = {"val/loss": "loss, nats per token", "val/bpb": "validation, bits per byte"}
MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}  # matplotlib's names
LEGEND_ENTRY_PIXELS = 420
LEGEND_CHARACTERS = 54  # that fit into LEGEND_ENTRY_PIXELS
LEAST_NAME = 12  # characters of a run's name in the legend


def draw_picture(path: Path, runs: list[Run], styles: list[LineStyle], width: int, height: int) -> None:
    """Write the PNG, `width` by `height` pixels including the legend. Raises StorageFailed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(len(METRICS), len(AXES), sharex="col", sharey="row")
    for row, (metric, metric_title) in enumerate(METRICS.items()):
        for column, (axis, axis_title) in enumerate(AXES.items()):
            lines = draw_panel(panels[row][column], runs, styles, metric, axis)
            panels[row][column].set_xlabel(axis_title)
        panels[row][0].set_ylabel(metric_title)
    n_columns = max(1, width // LEGEND_ENTRY_PIXELS)
    numbers = [str(number) for number in range(len(runs))]  # replaced: a label that begins with "_" would be left out
    legend = figure.legend(lines, numbers, loc="outside lower center", ncols=n_columns, fontsize=9, frameon=False)
    for text, entry in zip(legend.get_texts(), legend_texts(runs), strict=True):
        text.set_parse_math(False)  # a name is not a formula
        text.set_text(entry)
    with storing(path, of_run=False), replacing(path) as staging:
        FigureCanvasAgg(figure).print_png(str(staging))


def legend_texts(runs: list[Run]) -> list[str]:
    """One line for each run. Long names are shortened, so that the legend fits into the picture."""
    facts = [
        f" · {printable(run.model)}, {format_number(run.parameters)}, {format_number(run.tokens)} tokens"
        for run in runs
    ]
    width = max(LEAST_NAME, LEGEND_CHARACTERS - max(map(len, facts)))
    return [
        name + fact
        for name, fact in zip(shorten_names([printable(run.name) for run in runs], width), facts, strict=True)
    ]


def draw_panel(panel, runs: list[Run], styles: list[LineStyle], metric: str, axis: str) -> list[Line2D]:
    """Draw one metric against one axis, both on log scales. The vertical range holds every drawn figure.

    Returns each run's line with its markers.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, ScalarFormatter

    lines = [draw_run(panel, run, style, metric, axis) for run, style in zip(runs, styles, strict=True)]
    figures = [point[metric] for run in runs for point in run.validation]
    if metric == "val/loss":
        figures += [point["train/loss"] for run in runs for point in run.training]
    figures = [figure for figure in figures if figure > 0]  # a logarithmic scale shows no others
    margin = max((max(figures) / min(figures)) ** 0.06, 1.01) if figures else 1.0
    panel.set_xscale("log")
    panel.set_yscale("log")
    if figures:
        panel.set_ylim(min(figures) / margin, max(figures) * margin)
    panel.yaxis.set_major_locator(MaxNLocator(6))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_locator(LogLocator(subs=[]))
    panel.grid(True, color="#d5dae1", linewidth=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    return lines


def draw_run(panel, run: Run, style: LineStyle, metric: str, axis: str) -> Line2D:
    """Draw the run's validation curve with markers. For the loss, also draw its training curve as a thin line."""
    if metric == "val/loss":
        panel.plot(
            [point[axis] for point in run.training],
            [point["train/loss"] for point in run.training],
            color=style.light, linewidth=0.7, alpha=0.4, zorder=1,
        )  # fmt: skip
    (line,) = panel.plot(
        [point[axis] for point in run.validation],
        [point[metric] for point in run.validation],
        color=style.light, linewidth=1.8, marker=MARKERS[style.marker], markersize=4.5,
        linestyle=(0, tuple(map(float, style.dash.split()))) if style.dash else "-",
    )  # fmt: skip
    return line
