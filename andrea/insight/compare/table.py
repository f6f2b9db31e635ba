"""The table of the runs' latest figures, also formatted for a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from andrea.insight.compare.runs import Run
from andrea.runtime.streams import printable
from andrea.training.records.format import format_duration, format_number

NO_FIGURE = "–"  # in the cell of a run that did not record the column's figure


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    figure: Callable[[Run], str | None]  # None if the run did not record it


COLUMNS = (
    Column("params", "", lambda run: format_number(run.parameters)),
    Column("tokens", "trained on", lambda run: format_number(run.tokens)),
    Column("FLOPs", "of training", lambda run: f"{run.flops:.2e}"),
    Column("val loss", "nats per token, best evaluation", lambda run: f"{run.loss:.4f}"),
    Column("bpb", "bits per byte, best evaluation", lambda run: f"{run.bpb:.4f}"),
    Column("tok/s", "tokens per second, median", lambda run: format_if_known(run.speed.tokens_per_second, "{:,.0f}")),
    Column("MFU", "share of the device's peak FLOPs, median", lambda run: format_if_known(run.speed.mfu, "{:.1%}")),
    Column("memory", "peak", lambda run: memory_text(run.speed.peak_memory_bytes)),
    Column(
        "time", "of training steps, without evaluation, saving, compilation", lambda run: format_duration(run.seconds)
    ),
)


def format_if_known(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def memory_text(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / 2**30:.2f} GiB"


def make_table(runs: list[Run]) -> tuple[list[Column], list[list[str]]]:
    """Returns the columns for which at least one run has a figure, and one row of cells for each run."""
    cells = {column: [column.figure(run) for run in runs] for column in COLUMNS}
    columns = [column for column in COLUMNS if any(cell is not None for cell in cells[column])]
    return columns, [[cells[column][row] or NO_FIGURE for column in columns] for row in range(len(runs))]


def terminal_table(heads: list[str], rows: list[list[str]], width: int) -> str:
    """Format aligned columns. The first column is left-aligned, and shortened if a line would exceed `width`."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * (len(heads) - 1)))

    names = shorten_names([row[0] for row in rows], widths[0])
    widths[0] = max([widths[0], *map(len, names)])
    rows = [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]

    def line(cells: list[str]) -> str:
        first = f"{cells[0]:<{widths[0]}}"
        rest = [f"{cell:>{size}}" for cell, size in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(heads), *(line(row) for row in rows)])


def shorten_names(names: list[str], width: int) -> list[str]:
    """The names in at most `width` characters each. Names that would look alike show the part in which they differ.

    Names that still look alike stay whole.
    """
    shown = [shorten_in_middle(name, width) for name in names]
    alike = [name for name, short in zip(names, shown, strict=True) if shown.count(short) > names.count(name)]
    if not alike:
        return shown
    start = len(os.path.commonprefix(alike))
    end = min(len(os.path.commonprefix([name[::-1] for name in alike])), min(map(len, alike)) - start)
    parts = {name: name[: len(name) - end][-(width - 2) :] for name in alike}
    is_distinct = len(set(parts.values())) == len(parts)
    return [
        short if name not in parts else f"…{parts[name]}…" if is_distinct else name
        for name, short in zip(names, shown, strict=True)
    ]


def shorten_in_middle(text: str, width: int) -> str:
    """The text in at most `width` characters. Most of them are from its end, where names of runs usually differ."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
