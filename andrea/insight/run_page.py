"""The page of one run, run.html in its folder: the page of `compare` on this run alone, drawn again as the run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

from andrea.insight.compare.comparison import compare_runs
from andrea.insight.compare.page import render_page
from andrea.insight.compare.runs import LeftOut, read_run
from andrea.runtime.files import replace_text
from andrea.training.records import Logger

PAGE_NAME = "run.html"


@final
class RunPage(Logger):
    """Reads the run folder's records, which must be written first. There is no page before the first checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(self) -> None:
        """Write the page. Raises OSError."""
        try:
            run = read_run(self.folder, self.folder.resolve().name)
        except LeftOut:
            return
        lenses = [f"lens/{name}" for name in names_in(self.folder / "lens") if name.endswith(".html")]
        replace_text(self.folder / PAGE_NAME, render_page(compare_runs([run], [], None, None, seed=0), lenses))

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


def names_in(folder: Path) -> list[str]:
    """Sorted; none if there is no folder. Raises OSError if it cannot be read, where `Path.glob` would find nothing."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
