"""logger.csv: `metrics.csv` in the run folder, one row for each record, for spreadsheets and pandas."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, final

from andrea.runtime.files import replacing
from andrea.training.records.logger import Logger
from andrea.training.records.run_folder import read_lines


@final
class CsvFile(Logger):
    """Follows metrics.jsonl, which must be written first. Figures of single heads are tables, and are left out.

    A record with a new figure needs a new column. The file is then written again from metrics.jsonl. It is also written
    again when a run is resumed.
    """

    def __init__(self, folder: Path) -> None:
        self.records, self.path = folder / "metrics.jsonl", folder / "metrics.csv"
        self.columns: list[str] = []
        if read_lines(self.records):
            self.make_again()

    def record(self, record: dict[str, Any]) -> None:
        """Raises OSError if writing fails."""
        row = scalars(record)
        if not row.keys() <= set(self.columns):
            self.make_again()
            return
        with open(self.path, "a", encoding="utf-8", newline="") as stream:
            csv.DictWriter(stream, self.columns).writerow(row)

    def make_again(self) -> None:
        rows = [scalars(record) for record in read_lines(self.records)]
        self.columns = list(dict.fromkeys(key for row in rows for key in row))
        with replacing(self.path) as staging, open(staging, "w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    def sample(self, sample: dict[str, Any]) -> None:
        pass  # in samples.jsonl

    def page(self, page: dict[str, Any]) -> None:
        pass  # in the run folder

    def alert(self, alert: dict[str, Any]) -> None:
        pass  # in health.jsonl

    def finish(self, exit_code: int) -> None:
        pass


def scalars(record: dict[str, Any]) -> dict[str, Any]:
    """The figures that fit into one cell, without a lone surrogate, which UTF-8 cannot encode."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in record.items()
        if not isinstance(value, (list, dict))
    }
