"""Figures of runs as people read them, and the colours and marks by which runs are told apart on paper and screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from andrea.insight.compare.runs import Run
from andrea.training.records.format import format_duration, format_number

DASHES = ("", "7 3", "2 3", "9 3 2 3")  # of lines; '' is solid
MARKS = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Look:
    """How one run is drawn: its colour on light and on dark ground says its size, dash and mark tell equal sizes apart."""

    light: str
    dark: str
    dash: str
    mark: str


def looks(runs: list[Run]) -> list[Look]:
    """One look a run, for runs sorted by parameters."""
    sizes = sorted({run.parameters for run in runs})
    found = []
    for index, run in enumerate(runs):
        place = sizes.index(run.parameters) / max(1, len(sizes) - 1)
        among_equals = sum(other.parameters == run.parameters for other in runs[:index])
        found.append(
            Look(
                sequential(place, 0.28, 0.68),
                sequential(place, 0.52, 0.93),
                DASHES[among_equals % len(DASHES)],
                MARKS[among_equals % len(MARKS)],
            )
        )
    return found


def sequential(place: float, darkest: float, lightest: float) -> str:
    """A colour at `place` 0..1 of a scale from blue through green to ochre whose lightness rises evenly, as #rrggbb.

    Lightness alone orders it, so it does for every kind of colour vision and in grey. OKLCH, with the matrices of Ottosson
    2020 (A perceptual color space for image processing).
    """
    lightness, chroma, hue = darkest + place * (lightest - darkest), 0.12, math.radians(275 - 195 * place)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long, medium, short = (
        (lightness + first * a + second * b) ** 3
        for first, second in (
            (0.3963377774, 0.2158037573),
            (-0.1055613458, -0.0638541728),
            (-0.0894841775, -1.2914855480),
        )
    )
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    clipped = (min(1.0, max(0.0, value)) for value in linear)
    coded = (12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055 for value in clipped)
    return "#" + "".join(f"{round(255 * value):02x}" for value in coded)


# ------------------------------------------------------------------------------------------------------- numbers


def in_memory(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    write: Callable[[Run], str | None]  # None: the run did not record it


COLUMNS = (
    Column("params", "", lambda run: format_number(run.parameters)),
    Column("tokens", "trained on", lambda run: format_number(run.tokens)),
    Column("FLOPs", "of training", lambda run: f"{run.flops:.2e}"),
    Column("val loss", "nats a token, last evaluation", lambda run: f"{run.loss:.4f}"),
    Column("bpb", "bits a byte, last evaluation", lambda run: f"{run.bpb:.4f}"),
    Column("tok/s", "tokens a second, median", lambda run: written_or_none(run.tokens_per_second, "{:,.0f}")),
    Column("MFU", "share of the device's peak FLOPs, median", lambda run: written_or_none(run.mfu, "{:.1%}")),
    Column("memory", "peak", lambda run: None if run.peak_memory_bytes is None else in_memory(run.peak_memory_bytes)),
    Column(
        "time", "of training steps; evaluating, saving and compiling left out", lambda run: format_duration(run.seconds)
    ),
)


def written_or_none(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def table(runs: list[Run]) -> tuple[list[Column], list[list[str]]]:
    """The columns that some run has figures for, and the rows; '–' where this run has none."""
    cells = {column: [column.write(run) for run in runs] for column in COLUMNS}
    columns = [column for column in COLUMNS if any(cell is not None for cell in cells[column])]
    return columns, [[cells[column][row] or "–" for column in columns] for row in range(len(runs))]


def terminal_table(heads: list[str], rows: list[list[str]], width: int) -> str:
    """Aligned columns: the first to the left and cut in its middle where the line would be longer than `width`."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * (len(heads) - 1)))

    def line(cells: list[str]) -> str:
        first = f"{middle_cut(cells[0], widths[0]):<{widths[0]}}"
        rest = [f"{cell:>{size}}" for cell, size in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(heads), *(line(row) for row in rows)])


def middle_cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
