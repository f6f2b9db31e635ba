"""Every record reaches every logger, and a logger that fails does not end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_script, tiny_words

from andrea.runtime.files import StorageFailed
from andrea.training.parallel.ranks import Watchdog
from andrea.training.records import Logger, Progress
from andrea.training.records.console import Console
from andrea.training.records.records import Records
from andrea.training.records.run_folder import RunFolder, read_lines


class Broken(Logger):
    def fail(self, *arguments: Any) -> None:
        raise KeyError("a logger's own bug")

    record = sample = page = alert = finish = fail


def records_of(folder: Path, loggers: list[Logger]) -> Records:
    return Records(loggers, Console(steps=9), folder, Progress(step=7), Watchdog())


def test_a_failing_logger_is_reported_once_and_the_others_get_every_record(tmp_path: Path, capsys) -> None:
    records = records_of(tmp_path, [Broken(), RunFolder(tmp_path)])
    for loss in (2.0, 1.0):
        records.log({"train/loss": loss})
    records.sample({"prompt": "a", "text": "b"})
    records.page("lens", "<p>")
    records.alert("loops", begins=True, message="…")
    records.finish(0)
    assert [record["train/loss"] for record in read_lines(tmp_path / "metrics.jsonl")] == [2.0, 1.0]
    assert [(tmp_path / name).stat().st_size > 0 for name in ("samples.jsonl", "health.jsonl", "lens")] == 3 * [True]
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and 'step 7: the logger Broken failed (KeyError: "a logger\'s own bug")' in out
    assert "in fail" in (tmp_path / "run.log").read_text()


def test_the_run_folder_is_no_extra(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    records = records_of(tmp_path, [RunFolder(tmp_path)])
    with pytest.raises(StorageFailed, match="metrics.jsonl cannot be written"):
        records.log({"train/loss": 1.0})
    with pytest.raises(KeyboardInterrupt), records.extra("a sample"):
        raise KeyboardInterrupt
    assert not (tmp_path / "run.log").exists()


def test_a_logger_that_cannot_be_opened_is_one_line_and_the_run_goes_on(
    tiny_run, tmp_path: Path, notes: Path, script, capsys
) -> None:
    assert tiny_run("name=a", "train.steps=4") == 0
    (tmp_path / "runs" / "a" / "tensorboard").touch()  # a file where the folder of the event files would be
    capsys.readouterr()
    words = tiny_words(tmp_path, notes, "name=a", "resume=auto", "logger=tensorboard", "train.steps=8")
    code, out, err = run_script(script("train"), words, capsys)
    assert code == 0 and not err and "done at step 8 of 8" in out
    assert out.count("failed") == 1 and "step 4: the logger TensorBoard failed (FileExistsError" in out
