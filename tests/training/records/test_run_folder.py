"""metrics.jsonl and its siblings survive crashes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import shut

from andrea.api.command_line import configure
from andrea.config import RunConfig, UserError
from andrea.runtime.files import StorageFailed
from andrea.training.records.run_folder import RunFolder, new_run_folder, read_lines, read_records, run_folder_locked


def records(*steps: int) -> list[dict]:
    return [{"step": step, "tokens": 10 * step, "train/loss": 1 / (step + 1)} for step in steps]


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "tr')
    assert read_lines(path) == [{"step": 1}]
    assert read_lines(tmp_path / "absent.jsonl") == []


BAD_LINES = [b"5", b"[]", b"{}", b'{"step": "x"}', b'{"step": true}', b'{"step": -1}', b'{"step": 1e3}', b"\x00\x00",
             b'{"step": 2, "tr', b"\xff", b"[" * 9000, b"9" * 9000, b'{"step": 99999999999999}']  # fmt: skip


@pytest.mark.parametrize("bad", BAD_LINES)
def test_only_damaged_lines_are_left_out_and_nothing_is_lost(bad: bytes, tmp_path: Path) -> None:
    """One damaged line once took all later records with it when the run was resumed."""
    folder, said = RunFolder(tmp_path), []
    lines = [json.dumps(record).encode() for record in records(1, 2, 3, 4)]
    content = b"\n".join([lines[0], bad, lines[1], b"", lines[2], lines[3][:-9]])
    folder.metrics.write_bytes(content)
    found = read_records(folder.metrics)
    assert (found.records, found.damaged) == (records(1, 2, 3), [2])
    assert found.complaint == "metrics.jsonl: 1 damaged line (number 2) left out, 3 records read"
    folder.cut_after(2, said.append)
    assert folder.metrics.read_bytes() == b"\n".join([*lines[:2], b""])
    (aside,) = tmp_path.glob("aside-metrics.jsonl-*")
    assert aside.read_bytes() == content and said == [f"{found.complaint}; the file as it was is kept in {aside}"]
    folder.cut_after(2, said.append)
    assert len(said) == 1  # what remains is whole


def test_a_sample_without_its_texts_is_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 1, "prompt": "", "text": 2}\n{"step": 1, "prompt": "", "text": ""}\n')
    assert read_records(path).damaged == [1, 2] and len(read_lines(path)) == 1


def test_records_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.record(records(1)[0])
    with shut(folder.metrics), pytest.raises(StorageFailed, match=r"metrics\.jsonl cannot be read: Permission denied"):
        folder.cut_after(1)
    assert read_lines(folder.metrics) == records(1)


def test_cutting_removes_later_records_and_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for record in [*records(1, 2, 3), {"step": 2, "event": "stopped"}]:
        folder.record(record)
    folder.sample({"step": 3, "prompt": "", "text": "é"})
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


@pytest.mark.parametrize("name", [".lock", "run.log", "metrics.jsonl", "lens", "checkpoints"])
def test_a_run_writes_through_no_link_of_its_folder(name: str, tmp_path: Path) -> None:
    """A run folder may come from somebody else: a link `.lock` once emptied the file that it points to."""
    target, folder = tmp_path / "target", tmp_path / "run"
    folder.mkdir()
    target.mkdir() if name in ("lens", "checkpoints") else target.write_text("precious")
    (folder / name).symlink_to(target)
    with pytest.raises(UserError, match=f"{name} is a link or a device"), run_folder_locked(folder):
        pass
    assert list(target.iterdir()) == [] if target.is_dir() else target.read_text() == "precious"


def test_a_pipe_in_a_run_folder_does_not_block_the_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.log")
    with pytest.raises(UserError, match=r"run\.log is a link or a device"), run_folder_locked(tmp_path):
        pass


def test_a_link_to_a_whole_run_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "on-another-disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "on-another-disk")
    with run_folder_locked(tmp_path / "run"):
        assert (tmp_path / "on-another-disk" / ".lock").exists()


def test_runs_without_a_name_that_start_within_a_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20261123-032023")
    config = configure(RunConfig, "train", [f"runs_dir={tmp_path}"])
    folders = []
    for _ in range(3):
        folders.append(new_run_folder(config))
        folders[-1].mkdir()
        (folders[-1] / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    assert len(set(folders)) == 3
    named = configure(RunConfig, "train", [f"runs_dir={tmp_path}", f"name={folders[0].name}"])
    with pytest.raises(UserError, match="choose another name"):
        new_run_folder(named)
