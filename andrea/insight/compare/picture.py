"""The comparison as a PNG: validation loss and bits per byte against tokens, FLOPs and seconds."""

from __future__ import annotations

from pathlib import Path

from andrea.insight.compare.runs import Run
from andrea.insight.compare.table import Look
from andrea.runtime.files import replacing, storing
from andrea.training.records.format import format_number

DOTS_PER_INCH = 100
AXES = {"tokens": "tokens", "flops": "FLOPs of training", "seconds": "seconds of training steps"}
METRICS = {"val/loss": "validation loss, nats a token", "val/bpb": "bits per byte, validation"}


def draw_picture(path: Path, runs: list[Run], looks: list[Look], width: int, height: int) -> None:
    """Write the PNG, `width` by `height` pixels, the legend included."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(len(METRICS), len(AXES), sharex="col", sharey="row")
    for row, (metric, metric_words) in enumerate(METRICS.items()):
        for column, (axis, axis_words) in enumerate(AXES.items()):
            draw_panel(panels[row][column], runs, looks, metric, axis)
            panels[row][column].set_xlabel(axis_words)
        panels[row][0].set_ylabel(metric_words)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, width // 420), fontsize=9, frameon=False)
    with storing(path), replacing(path) as staging:
        FigureCanvasAgg(figure).print_png(str(staging))


def draw_panel(panel, runs: list[Run], looks: list[Look], metric: str, axis: str) -> None:
    """One metric against one axis; log scales; the range is that of the validation figures."""
    from matplotlib.ticker import LogLocator, MaxNLocator, ScalarFormatter

    marks = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}
    for run, look in zip(runs, looks, strict=True):
        dash = (0, tuple(map(float, look.dash.split()))) if look.dash else "-"
        if metric == "val/loss":
            panel.plot(
                [point[axis] for point in run.training],
                [point["train/loss"] for point in run.training],
                color=look.light, linewidth=0.7, alpha=0.4, zorder=1,
            )  # fmt: skip
        panel.plot(
            [point[axis] for point in run.validation],
            [point[metric] for point in run.validation],
            color=look.light, linewidth=1.8, linestyle=dash, marker=marks[look.mark], markersize=4.5,
            label=f"{run.name} · {run.model}, {format_number(run.parameters)}, {format_number(run.tokens)} tokens",
        )  # fmt: skip
    figures = [point[metric] for run in runs for point in run.validation]
    room = max(0.08 * (max(figures) - min(figures)), 0.01 * max(figures))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(min(figures) - room, max(figures) + room)
    panel.yaxis.set_major_locator(MaxNLocator(6))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_locator(LogLocator(subs=[]))
    panel.grid(True, color="#d5dae1", linewidth=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
