"""metrics.jsonl and its siblings survive crashes."""

from __future__ import annotations

import json
from pathlib import Path

from andrea.training.records.run_folder import RunFolder, read_lines


def records(*steps: int) -> list[dict]:
    return [{"step": step, "tokens": 10 * step, "train/loss": 1 / (step + 1)} for step in steps]


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "tr')
    assert read_lines(path) == [{"step": 1}]
    assert read_lines(tmp_path / "absent.jsonl") == []


def test_cutting_removes_later_records_and_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for record in [*records(1, 2, 3), {"step": 2, "event": "stopped"}]:
        folder.record(record)
    folder.sample({"step": 3, "text": "é"})
    folder.flush()
    folder.cut_after(2)
    folder.finish(0)
    assert [record["step"] for record in read_lines(folder.metrics)] == [1, 2]
    assert all("event" not in record for record in read_lines(folder.metrics))
    assert read_lines(folder.samples) == []


UNUSUAL_LINE_ENDS = (
    "\u2028 \u2029 \u0085 \x0b \x0c \x1c \r\n"  # only "\n" ends a line of the files, and JSON escapes it
)


def test_line_separators_within_a_record_end_no_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    samples = [{"step": step, "prompt": "", "text": UNUSUAL_LINE_ENDS} for step in (1, 2, 3)]
    for sample in samples:
        folder.sample(sample)
        folder.record({"step": sample["step"], f"val/{UNUSUAL_LINE_ENDS}/loss": 2.5})
    assert read_lines(folder.samples) == samples
    folder.cut_after(2)  # as a resume does
    assert read_lines(folder.samples) == samples[:2]
    assert [record["step"] for record in read_lines(folder.metrics)] == [1, 2]


def test_a_new_run_has_empty_files(tmp_path: Path) -> None:
    RunFolder(tmp_path).cut_after(-1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_prompt_that_is_not_utf_8_is_written_and_read_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.sample({"step": 1, "prompt": "a\udcff", "text": "é"})
    folder.cut_after(1)
    assert read_lines(folder.samples) == [{"step": 1, "prompt": "a\udcff", "text": "é"}]
