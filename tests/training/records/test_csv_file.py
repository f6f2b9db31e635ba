"""metrics.csv holds what metrics.jsonl holds, but for the tables of single heads."""

from __future__ import annotations

import csv
from pathlib import Path

from andrea.training.records.csv_file import CsvFile
from andrea.training.records.run_folder import RunFolder

RECORDS = [
    {"step": 1, "tokens": 7, "flops": 1.5, "seconds": 0.25, "train/loss": 3.5},
    {"step": 2, "tokens": 14, "flops": 3.0, "seconds": 0.5, "train/loss": None, "attention/heads/x": [[1.0]]},
    {"step": 2, "tokens": 14, "flops": 3.0, "seconds": 0.5, "val/loss": 2.5, "note": 'a,"b"\n\udcff'},
    {"step": 3, "tokens": 21, "flops": 4.5, "seconds": 0.75, "train/loss": 3.0},
]


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write(folder: Path, records: list[dict]) -> None:
    loggers = [RunFolder(folder), CsvFile(folder)]
    for record in records:
        for logger in loggers:
            logger.record(record)


def test_each_record_is_a_row_and_a_new_figure_a_column(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    found = rows(tmp_path)
    assert list(found[0]) == ["step", "tokens", "flops", "seconds", "train/loss", "val/loss", "note"]
    assert [row["step"] for row in found] == ["1", "2", "2", "3"]
    assert [row["train/loss"] for row in found] == ["3.5", "", "", "3.0"]
    assert found[2]["note"] == 'a,"b"\n?' and found[2]["val/loss"] == "2.5"


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    RunFolder(tmp_path).cut_after(1)
    write(tmp_path, [RECORDS[3]])
    assert [row["step"] for row in rows(tmp_path)] == ["1", "3"]
    assert list(rows(tmp_path)[0]) == ["step", "tokens", "flops", "seconds", "train/loss"]
