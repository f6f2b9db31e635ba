"""The run folder's records: `metrics.jsonl`, `samples.jsonl`, `health.jsonl` and HTML pages.

Records are appended as lines of JSON. On resume, the lines after the checkpoint's step are removed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

from andrea.runtime.files import flush_to_disk, replace_text, storing
from andrea.training.records.logger import Logger


@final
class RunFolder(Logger):
    """Writes a run's records into its folder. Raises StorageFailed where the disk refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.samples = folder / "samples.jsonl"
        self.alerts = folder / "health.jsonl"

    def record(self, record: dict[str, Any]) -> None:
        append_line(self.metrics, record)

    def sample(self, sample: dict[str, Any]) -> None:
        append_line(self.samples, sample)

    def page(self, page: dict[str, Any]) -> None:
        path = self.folder / page["name"] / f"step-{page['step']:08d}.html"
        with storing(path):
            path.parent.mkdir(exist_ok=True)
            replace_text(path, page["html"])

    def alert(self, alert: dict[str, Any]) -> None:
        append_line(self.alerts, alert)

    def finish(self, exit_code: int) -> None:
        self.flush()

    def flush(self) -> None:
        """Force all records to the disk. Called before a checkpoint is written, so that it never has later data."""
        for path in (self.metrics, self.samples, self.alerts):
            if path.exists():
                with storing(path):
                    flush_to_disk(path)

    def cut_after(self, step: int) -> None:
        """Remove the records of later steps, and the `event` lines: the run is about to continue from `step`."""
        for path in (self.metrics, self.samples, self.alerts):
            kept = [record for record in read_lines(path) if record["step"] <= step and "event" not in record]
            with storing(path):
                replace_text(path, "".join(map(json_line, kept)))


def append_line(path: Path, record: dict[str, Any]) -> None:
    with storing(path), open(path, "a", encoding="utf-8") as stream:
        stream.write(json_line(record))


def json_line(record: dict[str, Any]) -> str:
    r"""One line of JSON. A lone surrogate (from a prompt that was not UTF-8) has no bytes, so it is written as \udc80."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file, oldest first. A torn last line is ignored; a missing file has no records."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
