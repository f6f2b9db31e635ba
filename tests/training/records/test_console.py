"""The console: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import pytest

from andrea.training.records.console import Console

TRAINED = {
    "step": 10,
    "train/loss": 3.25,
    "train/rate": 1.0,
    "train/tokens_per_second": 1234.5,
    "train/seconds_per_step": 2.0,
}


def test_without_a_terminal_every_record_is_a_plain_line(capsys: pytest.CaptureFixture) -> None:
    console = Console(steps=20)
    with console.live_line():
        console.step(1, 3.0, 1.0, 10.0, 10.0)
    console.record(TRAINED)
    console.record({**TRAINED, "step": 20, "val/loss": 3.0, "val/bpb": 1.5, "val/a/bpb": 1.25, "val/a/loss": 2.0})
    console.record(TRAINED)
    console.record({"event": "done"})
    console.sample({"step": 20, "prompt": "[b]de", "text": "f\nx"})
    console.waiting("saving …")
    console.finish(0)
    out = capsys.readouterr().out
    assert "step 10/20 · 1,234 tokens/s · loss 3.250 · learning rate 100% of peak · 20 s left" in out
    assert "loss 3.250 · validation 1.500 bits/byte · learning rate" in out
    assert "validation loss 3.0000 · 1.5000 bits/byte · a 1.2500" in out
    assert "  │ [b]def\n  │ x" in out and "\x1b" not in out


def test_on_a_terminal_the_line_lives(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = Console(steps=20)
    with console.live_line():
        console.step(1, 3.0, 1.0, 10.0, 10.0)
        console.step(2, 2.0, 1.0, 10.0, 10.0)  # too soon after the first: not drawn
        console.record(TRAINED)
        console.waiting("saving …")
    out = capsys.readouterr().out
    assert "step  1/20" in out and "saving" in out and "loss 2.000" not in out


def test_a_sample_cannot_control_the_terminal(capsys: pytest.CaptureFixture) -> None:
    console = Console(steps=20)
    console.sample({"step": 20, "prompt": "\x1b]0;title\x07", "text": "\x9b2J\n"})
    assert "  │ \\x1b]0;title\\x07\\x9b2J\n" in capsys.readouterr().out


def test_the_time_left_is_that_of_the_steps_or_of_the_limit_if_they_take_longer() -> None:
    console = Console(steps=20, quiet=True)
    assert console.left_words(50.0) == "50 s left"
    console.seconds_left = lambda: 40.0
    assert console.left_words(30.0) == "30 s left" and console.left_words(50.0) == "40 s left of train.max_minutes"
    console.seconds_left = lambda: -3.0  # a time that is no limit
    assert console.left_words(30.0) == "30 s left"
