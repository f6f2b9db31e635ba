"""A figure of every head as an HTML table."""

from __future__ import annotations

import html


def heatmap(name: str, rows: list[list[float | None]]) -> str:
    """HTML of L rows (layers) of H figures (heads), shaded from lowest to highest. None stands for a missing figure."""
    known = [number for row in rows for number in row if number is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def cell(number: float | None) -> str:
        if number is None:
            return "<td>–</td>"
        share = (number - low) / (high - low) if high > low else 0.0
        ink = "#fff" if share > 0.5 else "#000"
        return f'<td style="background:hsl(215 70% {95 - 65 * share:.0f}%);color:{ink}">{number:.3g}</td>'

    lines = "".join(f"<tr><th>{layer}</th>{''.join(map(cell, row))}</tr>" for layer, row in enumerate(rows))
    heads = "".join(f"<th>{head}</th>" for head in range(len(rows[0])))
    style = "font:12px sans-serif;text-align:center;border-spacing:2px"
    caption = f"<caption>{html.escape(name)}: layers down, heads across</caption>"
    return f'<table style="{style}">{caption}<tr><th></th>{heads}</tr>{lines}</table>'
