"""wandb never asks a question and never ends a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import run_script, tiny_words

from andrea.config import LoggerConfig, UserError
from andrea.training.parallel.ranks import Watchdog
from andrea.training.records import Progress
from andrea.training.records.console import Console
from andrea.training.records.records import Records
from andrea.training.records.run_folder import RunFolder, read_lines
from andrea.training.records.weights_and_biases import Wandb, choose_wandb_mode, logged_in, open_wandb

RECORD = {"step": 3, "tokens": 30, "flops": 1.0, "seconds": 0.5, "train/loss": 0.25}


@pytest.fixture
def netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of a netrc file that does not exist yet, in an environment where nobody has logged in to wandb."""
    __import__("wandb").teardown()  # it reads the environment once
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def offline_wandb(runs_dir: Path, name: str, run_id: str | None, facts: dict | None = None) -> Wandb:
    config = LoggerConfig(wandb="offline", project="andrea")
    return open_wandb("offline", print, config, runs_dir, name, "tiny", run_id, facts or {})


def test_auto_is_offline_until_someone_logs_in(netrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_wandb_mode("auto") == "offline"
    assert choose_wandb_mode("disabled") == "disabled"
    with pytest.raises(UserError, match="wandb login"):
        choose_wandb_mode("online")
    netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    netrc.chmod(0o600)
    assert logged_in() and choose_wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_wandb_mode("auto") == "disabled"


def test_a_key_in_the_environment_counts_and_a_broken_netrc_does_not(
    netrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc.write_text("machine")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert logged_in()


def test_an_offline_run_is_kept_in_the_runs_folder_and_can_be_continued(netrc: Path, tmp_path: Path) -> None:
    run_id = None
    for _ in range(2):
        facts = {"config": {"seed": 1, "paths": ["\udcff"]}}
        wandb = offline_wandb(tmp_path, "run\udcff", run_id, facts)
        run_id = run_id or wandb.run_id
        assert wandb.run_id == run_id
        wandb.record({**RECORD, "attention/heads/entropy_nats": [[0.5, None], [1.5, 2.0]]})
        wandb.sample({**RECORD, "prompt": "<b>\udcff", "text": "&"})
        wandb.alert({**RECORD, "finding": "repeated_word", "begins": True, "message": "region"})
        wandb.alert({**RECORD, "finding": "repeated_word", "begins": False, "message": "over"})
        wandb.record({**RECORD, "event": "done", "val/bpb": 1.5})
        wandb.finish(0)
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
    pages = [path.read_text() for path in (tmp_path / "wandb").rglob("*.html")]
    assert any("attention/heads/entropy_nats" in page and ">1.5<" in page for page in pages)
    assert any("&lt;b&gt;\ufffd&amp;" in page for page in pages)  # a sample stays text


def test_a_resumed_offline_run_is_one_run_in_the_folder(netrc: Path, tmp_path: Path) -> None:
    """Readers such as `wandb leet` show one row for each offline-run-… folder."""
    folder, run_id = tmp_path / "one", None
    (folder / "lens").mkdir(parents=True)
    (folder / "lens" / "step-x.html").write_text("not of this program")
    for first in (1, 3, 4):  # the second process resumes after step 2, the third after step 3
        kept = RunFolder(folder)
        kept.cut_after(first - 1)
        wandb = offline_wandb(tmp_path, "one", run_id)
        run_id = wandb.run_id
        if first > 1:
            wandb.take_over(folder)
        for step in range(first, first + 3):
            record = {**RECORD, "step": step, "tokens": 10 * step, "train/loss": step / 8}
            for logger in (kept, wandb):
                logger.record(record)
                logger.sample({**record, "prompt": "p", "text": f"text of step {step}"})
                logger.page({**record, "name": "lens", "html": f"<p>lens of step {step}"})
        wandb.finish(0)
    (whole,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}*")
    assert len(list((tmp_path / "wandb").glob(f"aside-offline-run-*-{run_id}*"))) == 2
    pages = "".join(path.read_text() for path in whole.rglob("*.html"))
    assert all(f"{what} of step {step}" in pages for what in ("text", "lens") for step in range(1, 7))
    assert "<p>lens of step 6" in {path.read_text() for path in whole.rglob("*.html")}  # the page as it is given
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(whole)]
    shown = subprocess.run(inspect, capture_output=True, text=True, env=os.environ | {"WANDB_ERROR_REPORTING": "false"})
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    logged = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["train/loss"] for item in logged if "train/loss" in item] == [step / 8 for step in range(1, 7)]


def test_a_setting_that_wandb_refuses_is_named_before_anything_is_written(
    netrc: Path, tmp_path: Path, notes: Path, script, capsys
) -> None:
    words = tiny_words(tmp_path, notes, "name=a", "logger=wandb", "logger.project=a/b")
    code, out, err = run_script(script("train"), words, capsys)
    assert code == 2 and not out and err.count("\n") == 1
    assert "logger.project=a/b is refused by wandb" in err and "cannot contain characters" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["WANDB_TAGS=" + 69 * "x", "WANDB_MODE=nonsense", "WANDB_SAVE_CODE=perhaps"])
def test_a_setting_of_the_environment_that_wandb_refuses_is_one_line_and_the_run_goes_on(
    setting: str, netrc: Path, tmp_path: Path, notes: Path, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*setting.split("="))
    words = tiny_words(tmp_path, notes, "name=a", "logger=wandb", "train.steps=4")
    code, out, err = run_script(script("train"), words, capsys)
    assert code == 0 and not err and out.count("the logger Wandb failed (ValidationError") == 1
    assert "done at step 4 of 4" in out


def test_a_process_of_wandb_that_dies_is_one_line_and_the_run_goes_on(netrc: Path, tmp_path: Path, capfd) -> None:
    records = Records([RunFolder(tmp_path)], Console(steps=9), tmp_path, Progress(step=7), Watchdog())
    records.loggers.append(offline_wandb(tmp_path, "one", None))
    for number in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for child in number.read_text().split():
            if b"wandb-core" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while records.loggers[1].run is not None and time.monotonic() < deadline:
        records.log({"train/loss": 1.0})
        time.sleep(0.1)
    records.log({"train/loss": 2.0})
    records.finish(0)
    out, err = capfd.readouterr()
    assert out.count("the logger Wandb failed") == out.count("\n") == 1 and not err
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["train/loss"] == 2.0


def test_the_line_about_an_offline_run_uploads_it_when_typed(
    netrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it goes without a network: wandb finds the run, and asks for a login."""
    monkeypatch.chdir(tmp_path)
    wandb = offline_wandb(tmp_path / "run s", "one", None)
    wandb.record(RECORD)
    wandb.finish(0)
    (command,) = re.findall("`(wandb sync .*)`", wandb.where)
    words = [sys.executable, "-m", *shlex.split(command)]
    answer = subprocess.run(words, capture_output=True, text=True)
    assert "No runs to sync" not in answer.stdout + answer.stderr
    assert re.search(rf"Syncing 1 run.*run s.*{wandb.run_id}", answer.stdout + answer.stderr, re.DOTALL)
