"""torch's headers are compiled ahead where a run will need them, once, and training then takes those."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import tiny_command

from andrea.cli.command_line import configure
from andrea.cli.compile_ahead import compile_headers_ahead, kept_headers
from andrea.config import RunConfig

LONG = ["device=cpu", "compile=blocks"]


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def begun(*words: str) -> bool:
    thread = compile_headers_ahead(configure(RunConfig, "train", list(words)), list(words))
    if thread is not None:
        thread.join()
    return thread is not None


def test_nothing_is_begun_where_it_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("device=cuda", "device=mps", "compile=off", "dry_run=true"):
        assert not begun(*LONG, other), other
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        assert not begun(*LONG)
    with monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        assert not begun(*LONG)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert not begun(*LONG)


def test_a_run_too_short_to_compile_makes_none() -> None:
    assert begun("device=cpu", "compile=auto", "train.steps=1") and not kept_headers()


@pytest.mark.slow
def test_training_takes_the_headers_made_ahead(tmp_path: Path, notes: Path) -> None:
    assert begun(*LONG)
    made = kept_headers()
    assert len(made) == 1
    assert not begun(*LONG)  # nor a second time
    words = ["compile=blocks", "precision=bf16", "train.steps=2"]
    subprocess.run(tiny_command(tmp_path, notes, *words), check=True)
    assert kept_headers() == made
