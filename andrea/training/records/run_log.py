"""`run.log` in the run folder: the errors that did not end the run. Without such errors there is no file."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


class RunLog:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.log"

    def write(self, text: str) -> None:
        """Append `text` with the date and time. If the disk is full, the text is lost, and the run goes on."""
        with suppress(OSError), open(self.path, "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
