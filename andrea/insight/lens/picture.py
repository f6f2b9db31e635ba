"""Draws one head's attention map as a PNG."""

from __future__ import annotations

import io

import numpy as np

MOST_LABELLED_TOKENS = 96  # more would overlap on the axes


def attention_map_png(weights: np.ndarray, labels: list[str], title: str) -> bytes:
    """PNG of weights (T, T): rows are queries, columns are keys. Masked weights are NaN, and their cells are blank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n_token = len(labels)
    side_inches = min(14.0, 2.5 + 0.2 * n_token)
    figure = Figure(figsize=(side_inches, side_inches), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(weights), cmap="cividis", vmin=0.0, vmax=1.0, interpolation="nearest")
    if n_token <= MOST_LABELLED_TOKENS:
        style = {"fontsize": 7, "family": "monospace", "parse_math": False}
        axes.set_xticks(range(n_token), labels, rotation=90, **style)
        axes.set_yticks(range(n_token), labels, **style)
    axes.set_title(title, parse_math=False)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    figure.colorbar(image, label="attention weight", shrink=0.7)
    stream = io.BytesIO()
    FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()
