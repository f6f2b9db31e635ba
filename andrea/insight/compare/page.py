"""What the comparison shows: the command `python -m andrea compare RUN_DIR… [key=value …]`, its page, and a run's `run.html`.

The page is one HTML file that holds its data, style and script, and loads nothing from a network.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from andrea.checkpoint import step_name
from andrea.config import CompareConfig, ModelConfig, UserError, as_typed
from andrea.config.keys import flatten
from andrea.insight.compare.births import birth_lines, births_data
from andrea.insight.compare.comparison import (
    comparability_warnings,
    difference_lines,
    differences,
    line_style,
    make_table,
    notes_on,
    scaling_lines,
    summary_of,
    terminal_table,
)
from andrea.insight.compare.runs import LeftOut, Run, axes_of, find_run_folders, read_run, read_runs
from andrea.insight.html import fill_template, json_for_script
from andrea.insight.lens.scores import NAMES
from andrea.runtime.files import replace_text, storing
from andrea.runtime.streams import at_words, printable
from andrea.runtime.user_classes import allowing
from andrea.training.records import AXES, Logger
from andrea.training.records.console import format_number

# ---------------------------------------------------------------------------------------------------------- the command

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
        scaling = scaling_lines(runs, predicted, config.predict_tokens, config.seed)
    for line in terminal_lines(runs, scaling):
        say(line)

    page = Path(config.out)
    with storing(page, of_run=False):
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_text(page, render_page(runs, left_out, scaling))
    say(f"written: {page}")
    return 0


def terminal_lines(runs: list[Run], scaling: Sequence[str]) -> list[str]:
    """The comparison as lines of text for a terminal. scaling: from `scaling_lines`."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((USUAL_WIDTH, 24)).columns)
    columns, rows = make_table(runs)
    lines = notes_on(runs)
    lines += [f"warning: {warning}" for warning in comparability_warnings(runs)]
    lines += [*birth_lines(runs), *scaling]
    if differing := differences(runs):
        lines.append("configuration keys that differ:")
        lines += [f"  {line}" for line in difference_lines(differing)]
    table = terminal_table(["run", *(column.title for column in columns)], rows, width)
    return [table, *(at_words(printable(line)) for line in lines)]


# ------------------------------------------------------------------------------------------------------------- the page

TEMPLATE = Path(__file__).parent / "web" / "template.html"
MOST_TRAINING_POINTS = 400  # of each run's training curve
EXPECTED = {"expected": "bpb", "spread": "spread_bpb"}  # figures of a run with an expected curve
MOST_SAMPLES, MOST_MEASUREMENTS = 12, 40  # shown of a single run


def render_page(
    runs: list[Run], left_out: Sequence[str] = (), scaling: Sequence[str] = (), lenses: Sequence[str] = ()
) -> str:
    """The HTML text of the page. lenses: addresses of a single run's lens pages, the oldest first. Others: see `page_data`."""
    return fill_template(TEMPLATE, {"DATA": json_for_script(page_data(runs, left_out, scaling) | {"lenses": lenses})})


def page_data(runs: list[Run], left_out: Sequence[str] = (), scaling: Sequence[str] = ()) -> dict[str, Any]:
    """The data that the page's script reads. runs: at least one, smallest model first. scaling: from `scaling_lines`.

    left_out: a line for each folder that could not be compared.
    """
    columns, rows = make_table(runs)
    return {
        "title": "Comparison of runs" if len(runs) > 1 else f"Run {runs[0].name}",
        "summary": summary_of(runs),
        "samples": [],
        "measured_heads": [],
        "settings": [],
        **(one_run_data(runs[0]) if len(runs) == 1 else {}),
        "warnings": comparability_warnings(runs),
        "notes": [*notes_on(runs), *left_out],
        "heads": [["run", ""], *([column.title, column.unit] for column in columns)],
        "rows": rows,
        "scaling": scaling,
        "patterns": [{key: getattr(name, key) for key in ("score", "title", "meaning", "threshold")} for name in NAMES],
        "differences": [[key, *map(as_typed, values)] for key, values in differences(runs).items()],
        "runs": [run_data(run) | line_style(runs, index) for index, run in enumerate(runs)],
    }


def one_run_data(run: Run) -> dict[str, Any]:
    """The data shown for a single run besides its curves: the last samples, newest first, its heads over time, its settings."""
    stride = -(-len(run.heads) // MOST_MEASUREMENTS) or 1
    shown = run.samples[-MOST_SAMPLES:][::-1]
    return {
        "samples": [{key: each[key] for key in ("step", "prompt", "text")} for each in shown],
        "earlier_samples": len(run.samples) - len(shown),
        "measured_heads": run.heads[::-1][::stride][::-1],  # with the last measurement
        "settings": [[key, as_typed(value)] for key, value in flatten(run.config).items()],
    }


def run_data(run: Run) -> dict[str, Any]:
    """The data of one run's line in the charts."""
    stride = -(-len(run.training) // MOST_TRAINING_POINTS) or 1
    return {
        "name": run.name,
        "size": f"{run.config['model']['name']}, {format_number(run.parameters)}, {format_number(run.tokens)} tokens",
        "validation": [
            axes_of(point)
            | {"loss": point["val/loss"], "bpb": point["val/bpb"]}
            | {key: point[f"expected/{name}"] for key, name in EXPECTED.items() if f"expected/{name}" in point}
            for point in run.validation
        ],
        "training": [
            {key: point[key] for key in AXES} | {"loss": point["train/loss"]} for point in run.training[::stride]
        ],
        "births": births_data(run),
        "sizes": run.sizes,
    }


# ------------------------------------------------------------------------------------------------------- a run's own page

RUN_PAGE = "run.html"  # in the run's folder


@final
class RunPage(Logger):
    """The page of one run, with links to its lens pages, drawn again as the run goes on.

    It reads the run folder's records, which must be written first. There is no page before the first checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(self) -> None:
        """Write the page. Raises OSError."""
        try:
            run = read_run(self.folder, self.folder.resolve().name)
        except LeftOut:
            return
        try:
            names = os.listdir(self.folder / "lens")  # Path.glob would find nothing in an unreadable folder
        except (FileNotFoundError, NotADirectoryError):
            names = []
        # Others are a user's own, or of steps that a run, which has gone back to an earlier step, has not reached again.
        of_evaluations = [f"{step_name(point['step'])}.html" for point in run.validation]
        lenses = [f"lens/{name}" for name in of_evaluations if name in names]
        replace_text(self.folder / RUN_PAGE, render_page([run], lenses=lenses))

    def record(self, record: dict[str, Any]) -> None:
        if "val/loss" in record:
            self.draw()

    def sample(self, sample: dict[str, Any]) -> None:
        self.draw()

    def page(self, page: dict[str, Any]) -> None:
        self.draw()

    def alert(self, alert: dict[str, Any]) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        self.draw()  # a run that goes on after its last page was written has no other event
