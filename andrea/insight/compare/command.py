"""The command `python -m andrea compare RUN_DIR… [key=value …]`: a table and a page of runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from andrea.config import CompareConfig, ModelConfig, UserError
from andrea.insight.compare.comparison import Comparison, compare_runs, difference_lines, terminal_table
from andrea.insight.compare.page.page import render_page
from andrea.insight.compare.runs import find_run_folders, read_runs
from andrea.runtime.files import replace_text, storing
from andrea.runtime.own_parts import allowing
from andrea.runtime.streams import at_words, printable

LEAST_WIDTH, USUAL_WIDTH = 80, 100  # characters of the terminal's lines


def compare(config: CompareConfig, predicted: ModelConfig | None, say: Callable[[str], None] = print) -> int:
    """Compare the runs of config.runs; `say` takes each line of text. Returns the exit code.

    predicted: the model of config.predict. Raises UserError if no folder can be compared, StorageFailed if writing
    fails.
    """
    runs, left_out = read_runs(find_run_folders(config.runs, config.runs_dir))
    for line in left_out:
        say(printable(line))
    if not runs:
        raise UserError("nothing to compare: every run was left out; train until the first evaluation and checkpoint")
    with allowing((), config.trust):
        comparison = compare_runs(runs, left_out, predicted, config.predict_tokens, config.seed)
    for line in terminal_lines(comparison):
        say(line)

    page = Path(config.out)
    with storing(page, of_run=False):
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_text(page, render_page(comparison))
    say(f"written: {page}")
    return 0


def terminal_lines(comparison: Comparison) -> list[str]:
    """The comparison as lines of text for a terminal."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((USUAL_WIDTH, 24)).columns)
    heads = ["run", *(column.title for column in comparison.columns)]
    lines = list(comparison.notes)
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    lines += comparison.scaling
    if comparison.differing:
        lines.append("configuration keys that differ:")
        lines += [f"  {line}" for line in difference_lines(comparison.differing)]
    return [terminal_table(heads, comparison.rows, width), *(at_words(printable(line)) for line in lines)]
