"""Colours, dashes and markers that distinguish the runs, on the page and in the picture."""

from __future__ import annotations

import math
from dataclasses import dataclass

from andrea.insight.compare.runs import Run

DASHES = ("", "7 3", "2 3", "9 3 2 3")  # lengths of dash and gap in pixels; '' is a solid line
MARKERS = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class LineStyle:
    """How one run is drawn. Colours are ordered by the model's size; runs of one size also differ in dash and marker."""

    light: str  # colour on a light background, #rrggbb
    dark: str  # colour on a dark background, #rrggbb
    dash: str
    marker: str


def line_styles(runs: list[Run]) -> list[LineStyle]:
    """One style for each run, each with a colour of its own. The runs come smallest first."""
    styles = []
    for index, run in enumerate(runs):
        place = index / max(1, len(runs) - 1)
        among_equals = sum(other.parameters == run.parameters for other in runs[:index])
        styles.append(
            LineStyle(
                colour_at(place, 0.28, 0.68),
                colour_at(place, 0.52, 0.93),
                DASHES[among_equals % len(DASHES)],
                MARKERS[among_equals % len(MARKERS)],
            )
        )
    return styles


def colour_at(place: float, darkest: float, lightest: float) -> str:
    """The colour at `place` (0 to 1) of a scale from dark blue over green to light ochre, as #rrggbb.

    The lightness rises evenly, so the order is visible in greyscale and with any colour blindness. The colour is
    computed in OKLCH, with the matrices of Ottosson 2020 (A perceptual color space for image processing).
    """
    lightness, chroma, hue = darkest + place * (lightest - darkest), 0.12, math.radians(275 - 195 * place)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long, medium, short = (  # responses of the three kinds of cones in the eye
        (lightness + of_a * a + of_b * b) ** 3
        for of_a, of_b in (
            (0.3963377774, 0.2158037573),
            (-0.1055613458, -0.0638541728),
            (-0.0894841775, -1.2914855480),
        )
    )
    linear_rgb = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    clipped = (min(1.0, max(0.0, value)) for value in linear_rgb)
    encoded = (12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055 for value in clipped)
    return "#" + "".join(f"{round(255 * value):02x}" for value in encoded)
