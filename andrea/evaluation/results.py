"""The figures of an evaluation: as records of the run's folder, and as lines for people.

RUN/evaluations.jsonl has one line for each figure. A later figure of the same questions, or of the same text, replaces an
earlier one when they are read, so an evaluation can be repeated.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from andrea.checkpoint import Checkpoint
from andrea.runtime.files import from_json, lines_of, replace_bytes, storing

FILE = "evaluations.jsonl"
TEXT_METRIC = "bits_per_byte"


Asked = tuple[str, str, int, str, str]  # task, metric, n, about and precision of a figure


@dataclass(frozen=True)
class Figure:
    """One figure of one task. value: of the metric. n: the questions that were asked, or the documents that were read.

    standard_error: of the value; None if it is unknown. chance: what random answers would give; None where this has no
    meaning. about: what was read or asked, for people. precision: of the weights; n_byte of all of them, 0 if unknown.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    chance: float | None
    n: int
    about: str
    precision: str = "fp32"
    n_byte: int = 0

    @property
    def asked(self) -> Asked:
        return self.task, self.metric, self.n, self.about, self.precision

    @property
    def text(self) -> str:
        """The value with its standard error: 0.512 ± 0.029, or 1.0567 ± 0.0110 for bits per byte."""
        digits = 4 if self.metric == TEXT_METRIC else 3
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{self.value:.{digits}f}{error}"


Judged = dict[Asked, tuple[int, Figure]]  # the step of the checkpoint, and its newest figure


def run_of(checkpoint: Checkpoint) -> Path | None:
    """The run's folder; None for a checkpoint outside of a run."""
    path = checkpoint.path.resolve()
    return path.parents[1] if path.parent.name == "checkpoints" else None


def append_figures(run: Path, checkpoint: Checkpoint, figures: Sequence[Figure], versions: dict[str, str]) -> Path:
    """Add the figures of a checkpoint to the run's records, and return their file. Raises StorageFailed."""
    path = run / FILE
    common = {"step": checkpoint.step, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "versions": versions}
    with storing(path, of_run=False):
        before = path.read_bytes() if path.is_file() else b""  # as it is: a line may be damaged
        before += b"\n" if before and not before.endswith(b"\n") else b""
        added = "".join(json.dumps(asdict(each) | common) + "\n" for each in figures)
        replace_bytes(path, before + added.encode())
    return path


def read_figures(run: Path) -> Judged:
    """The newest figures in the run's records. Lines that are not records are left out. Raises OSError."""
    path, found = run / FILE, {}
    if not path.is_file():  # reading a pipe would wait for ever
        return {}
    for line in lines_of(path.read_bytes().decode("utf-8", "replace")):
        try:
            record = from_json(line)
            figure = figure_of(record)
        except (ValueError, KeyError, TypeError):
            continue
        found[figure.asked] = record["step"], figure
    return found


def figure_of(record: Any) -> Figure:
    """Raises KeyError, TypeError or ValueError for anything but a record that `append_figures` wrote."""
    kinds = {"step": (int,), "task": (str,), "metric": (str,), "value": (int, float), "n": (int,), "about": (str,)}
    kinds |= {key: (int, float, type(None)) for key in ("standard_error", "chance")}
    newer = {"precision": (str,), "n_byte": (int,)}  # records of older versions lack them
    kinds |= {key: kind for key, kind in newer.items() if key in record}
    if not all(type(record[key]) in allowed for key, allowed in kinds.items()):
        raise TypeError
    return Figure(**{key: record[key] for key in kinds if key != "step"})


def table_lines(figures: Sequence[Figure]) -> list[str]:
    """A table of the figures; a note in each line says whether a value differs from chance by more than its error allows."""
    rows = [["task", "metric", "value", "chance", "n", ""]]
    for each in figures:
        chance = "–" if each.chance is None else f"{each.chance:.3f}"
        rows.append([each.task, each.metric, each.text, chance, f"{each.n:,}", note_on(each)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def note_on(figure: Figure) -> str:
    if figure.chance is None or not figure.standard_error:
        return figure.about
    above = (figure.value - figure.chance) / figure.standard_error
    where = "above" if above > 0 else "below"
    return f"{abs(above):.1f} standard errors {where} chance" + ("" if abs(above) >= 2 else ": may be chance")
