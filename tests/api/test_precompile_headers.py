"""torch's headers are precompiled where a run needs them, once, and training then uses them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import tiny_command

from andrea.api.command_line import configure
from andrea.api.run import cached_headers, precompile_headers
from andrea.config import RunConfig

LONG = ["device=cpu", "compile=blocks"]


@pytest.fixture(autouse=True)
def no_cached_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def started(*words: str) -> bool:
    thread = precompile_headers(configure(RunConfig, "train", list(words)), list(words))
    if thread is not None:
        thread.join()
    return thread is not None


def test_nothing_is_started_where_headers_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("device=cuda", "device=mps", "compile=off", "dry_run=true"):
        kept = [word for word in LONG if word.partition("=")[0] != other.partition("=")[0]]
        assert not started(*kept, other), other
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        assert not started(*LONG)
    with monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        assert not started(*LONG)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert not started(*LONG)


def test_a_run_too_short_to_compile_needs_no_headers() -> None:
    assert started("device=cpu", "compile=auto", "train.steps=1") and not cached_headers()


@pytest.mark.slow
@pytest.mark.long
def test_training_uses_the_precompiled_headers(tmp_path: Path, notes: Path) -> None:
    assert started(*LONG)
    headers = cached_headers()
    assert len(headers) == 1
    assert not started(*LONG)  # a second time
    words = ["compile=blocks", "precision=bf16", "train.steps=2"]
    subprocess.run(tiny_command(tmp_path, notes, *words), check=True)
    assert cached_headers() == headers
