"""The table of figures, and the colours and markers of runs."""

from __future__ import annotations

import re
from pathlib import Path

from run_folders import make_eight_runs

from andrea.insight.compare.comparison import (
    colour_at,
    line_style,
    make_table,
    shorten_in_middle,
    shorten_names,
    terminal_table,
)
from andrea.insight.compare.runs import find_run_folders, read_runs


def test_the_table_is_aligned_within_a_hundred_columns(tmp_path: Path) -> None:
    found, _ = read_runs(find_run_folders([str(make_eight_runs(tmp_path))]))
    columns, rows = make_table(found)
    assert "MFU" not in [column.title for column in columns]  # no run recorded it
    named = [["a-very-long-name-of-a-run-" * 4, *row[1:]] for row in rows]
    lines = terminal_table(["run", *(column.title for column in columns)], named, 100).splitlines()
    assert max(map(len, lines)) <= 100
    assert {line.rindex(line.split("  ")[-1].strip()[-1]) for line in lines[1:]} == {len(lines[1]) - 1}
    assert all("…" in line for line in lines[1:])


def test_a_name_keeps_its_end() -> None:
    name = "andrea-nano-pystdlib-20261122-122957"
    assert shorten_in_middle(name, 25) == "andrea-n…-20261122-122957"
    assert shorten_in_middle(name, len(name)) == name


def test_names_that_would_look_alike_stay_whole() -> None:
    sweep = [
        f"andrea-nano-10.2k-seed1337-matrix_learning_rate={rate}-sweep-20261123-030959" for rate in ("0.01", "0.2")
    ]
    assert shorten_names([*sweep, "two"], 24) == [*sweep, "two"]
    assert shorten_names([sweep[0], "x" * 40], 24) == [shorten_in_middle(name, 24) for name in (sweep[0], "x" * 40)]
    assert shorten_names([sweep[0], sweep[0]], 24)[0] == shorten_in_middle(sweep[0], 24)  # one name twice


def test_colours_order_runs_by_lightness_and_each_has_one_of_its_own(tmp_path: Path) -> None:
    found, _ = read_runs(find_run_folders([str(make_eight_runs(tmp_path))]))
    drawn = [line_style(found, index) for index in range(len(found))]
    for ground in ("light", "dark"):
        colours = list(dict.fromkeys(style[ground] for style in drawn))
        assert len(colours) == 8
        lightness = [float(re.fullmatch(r"oklch\((\S+) 0\.12 \S+\)", colour)[1]) for colour in colours]
        assert lightness == sorted(lightness)
    assert all(first["marker"] != second["marker"] for first, second in zip(drawn[::2], drawn[1::2], strict=True))
    assert colour_at(1, 0.5, 1.0) == "oklch(1.0000 0.12 80.00)"
