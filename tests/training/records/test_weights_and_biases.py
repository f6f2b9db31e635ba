"""wandb never asks a question and never ends a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from andrea.config import LoggerConfig, UserError
from andrea.training.records.run_folder import RunFolder
from andrea.training.records.weights_and_biases import TolerateWandbErrors, Wandb, choose_wandb_mode, logged_in

RECORD = {"step": 3, "tokens": 30, "flops": 1.0, "seconds": 0.5, "train/loss": 0.25}


@pytest.fixture
def netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of a netrc file that does not exist yet, in an environment where nobody has logged in to wandb."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_auto_is_offline_until_someone_logs_in(netrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_wandb_mode("auto")[0] == "offline"
    assert choose_wandb_mode("disabled")[0] == "disabled"
    with pytest.raises(UserError, match="wandb login"):
        choose_wandb_mode("online")
    netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    netrc.chmod(0o600)
    assert logged_in() and choose_wandb_mode("auto")[0] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_wandb_mode("auto")[0] == "disabled"


def test_a_key_in_the_environment_counts_and_a_broken_netrc_does_not(
    netrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc.write_text("machine")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert logged_in()


def test_an_offline_run_is_kept_in_the_runs_folder_and_can_be_continued(netrc: Path, tmp_path: Path) -> None:
    config = LoggerConfig(wandb="offline", project="andrea", group=None, tags=["a"])
    run_id = None
    for _ in range(2):
        facts = {"config": {"seed": 1, "paths": ["\udcff"]}}
        wandb = Wandb(config, "offline", tmp_path, "run\udcff", "tiny", run_id, facts)
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
    config = LoggerConfig(wandb="offline", project="andrea", group=None, tags=[])
    folder, run_id = tmp_path / "one", None
    (folder / "lens").mkdir(parents=True)
    (folder / "lens" / "step-x.html").write_text("not of this program")
    for first in (1, 3, 4):  # the second process resumes after step 2, the third after step 3
        kept = RunFolder(folder)
        kept.cut_after(first - 1)
        wandb = Wandb(config, "offline", tmp_path, "one", "tiny", run_id, {})
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


def test_only_errors_of_wandb_are_tolerated(capsys: pytest.CaptureFixture) -> None:
    import wandb

    for error in (wandb.errors.CommError("no server\n  at all"), ConnectionResetError("gone")):
        with TolerateWandbErrors("training continues") as attempt:
            raise error
        assert attempt.failed
    assert capsys.readouterr().out == (
        "wandb failed (no server at all); training continues\nwandb failed (gone); training continues\n"
    )
    with pytest.raises(KeyError), TolerateWandbErrors("training continues"):
        raise KeyError("a bug")
