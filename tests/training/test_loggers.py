"""metrics.jsonl that survives crashes, and wandb that never asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from andrea.config import LoggerConfig, UserError
from andrea.training.records.loggers import (
    Forgiving,
    RunFolder,
    Wandb,
    choose_wandb_mode,
    escape,
    logged_in,
    read_lines,
)


def records(*steps: int) -> list[dict]:
    return [
        {"step": step, "tokens": 10 * step, "flops": 1.0, "seconds": 0.5, "train/loss": 1 / (step + 1)}
        for step in steps
    ]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "tr')
    assert read_lines(path) == [{"step": 1}]
    assert read_lines(tmp_path / "absent.jsonl") == []


def test_cutting_drops_what_lies_beyond_and_ends_that_were_not_the_end(tmp_path: Path) -> None:
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


def test_a_new_run_has_empty_files(tmp_path: Path) -> None:
    RunFolder(tmp_path).cut_after(-1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment in which nobody has logged in to wandb."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_auto_is_offline_until_someone_logs_in(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_wandb_mode("auto")[0] == "offline"
    assert choose_wandb_mode("disabled")[0] == "disabled"
    with pytest.raises(UserError, match="wandb login"):
        choose_wandb_mode("online")
    nobody.write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    nobody.chmod(0o600)
    assert logged_in() and choose_wandb_mode("auto")[0] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_wandb_mode("auto")[0] == "disabled"


def test_a_key_in_the_environment_counts_and_a_broken_netrc_does_not(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody.write_text("machine")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert logged_in()


def test_an_offline_run_lies_in_the_runs_folder_and_can_be_gone_on_with(nobody: Path, tmp_path: Path) -> None:
    config = LoggerConfig(wandb="offline", project="andrea", group=None, tags=["a"])
    run_id = None
    for _ in range(2):
        facts = {"config": {"seed": 1, "paths": ["\udcff"]}}
        wandb = Wandb(config, "offline", tmp_path, "run\udcff", "tiny", run_id, facts)
        run_id = run_id or wandb.run_id
        assert wandb.run_id == run_id
        wandb.record({**records(3)[0], "attention/heads/entropy_nats": [[0.5, None], [1.5, 2.0]]})
        wandb.sample({**records(3)[0], "prompt": "<\udcff", "text": "b"})
        wandb.record({**records(3)[0], "event": "done", "val/bpb": 1.5})
        wandb.finish(0)
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
    pages = [path.read_text() for path in (tmp_path / "wandb").rglob("*.html")]
    assert any("attention/heads/entropy_nats" in page and ">1.5<" in page for page in pages)


def test_html_in_a_sample_stays_text() -> None:
    assert escape("<b>&") == "&lt;b>&amp;"


def test_a_prompt_that_was_no_utf_8_is_written_and_read_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.sample({"step": 1, "prompt": "a\udcff", "text": "é"})
    folder.cut_after(1)
    assert read_lines(folder.samples) == [{"step": 1, "prompt": "a\udcff", "text": "é"}]


def test_only_wandb_s_own_errors_are_forgiven(capsys: pytest.CaptureFixture) -> None:
    import wandb

    for error in (wandb.errors.CommError("no server\n  at all"), ConnectionResetError("gone")):
        with Forgiving("we go on") as told:
            raise error
        assert told.failed
    assert capsys.readouterr().out == "wandb failed (no server at all); we go on\nwandb failed (gone); we go on\n"
    with pytest.raises(KeyError), Forgiving("we go on"):
        raise KeyError("a bug")
