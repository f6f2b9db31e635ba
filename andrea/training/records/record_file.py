"""Reads and writes `metrics.jsonl`, `samples.jsonl` and `health.jsonl`: one record of JSON a line, each with its `step`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andrea.checkpoint.state import LARGEST_STEP
from andrea.runtime.files import from_json, reading, storing

LARGEST_FIGURE = 1e100  # larger ones are mistakes
TEXTS = {"samples.jsonl": ("prompt", "text")}  # the keys of a record that hold text, by the name of its file
SHOWN_NUMBERS = 5


@dataclass(frozen=True)
class RecordFile:
    """The content of a file of records. lines: the records as the file has them.

    damaged: the numbers, from 1, of the lines that hold no record. A torn last line, as a crash leaves it, is not counted.
    """

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    @property
    def complaint(self) -> str:
        """A line that counts and names the damaged lines; empty if there is none."""
        if not self.damaged:
            return ""
        numbers = ", ".join(map(str, self.damaged[:SHOWN_NUMBERS])) + ", …" * (len(self.damaged) > SHOWN_NUMBERS)
        counted = f"{len(self.damaged)} damaged line{'s' * (len(self.damaged) > 1)} (number {numbers})"
        return f"{self.path.name}: {counted} left out, {len(self.records)} records read"


def read_records(path: Path) -> RecordFile:
    """The records of a file, oldest first. Without a regular file there are none. Raises StorageFailed."""
    found = RecordFile(path)
    with reading(path):
        if not path.is_file():  # reading a pipe would wait for ever
            return found
        *lines, torn = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, torn], 1):
        record = record_in(line, path.name)
        if record is not None:
            found.records.append(record)
            found.lines.append(line)
        elif number <= len(lines) and line.strip():
            found.damaged.append(number)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first, without its damaged lines, which `read_records` counts. Raises StorageFailed."""
    return read_records(path).records


def record_in(line: bytes, file_name: str) -> dict[str, Any] | None:
    """The record that a line holds; None if it holds none: a mapping with a step, and with the texts of its file."""
    try:
        record = from_json(line.decode())
    except ValueError:
        return None
    has_step = isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] <= LARGEST_STEP
    has_texts = has_step and all(isinstance(record.get(key), str) for key in TEXTS.get(file_name, ()))
    return record if has_texts else None


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Raises StorageFailed."""
    with storing(path), open(path, "a", encoding="utf-8") as stream:
        stream.write(json_line(record))


def json_line(record: dict[str, Any]) -> str:
    r"""One line of JSON. A lone surrogate, which UTF-8 cannot encode, is escaped as in \udc80."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def is_number(value: Any) -> bool:
    """Whether the value is a finite number that can also be squared, drawn, and written in a table."""
    return type(value) in (int, float) and abs(value) <= LARGEST_FIGURE


def values_of(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if is_number(record.get(key))]
