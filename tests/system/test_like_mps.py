"""Whole commands on a device without fp64, as Apple's MPS is: see tests/like_mps.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, tiny_words

pytestmark = pytest.mark.slow


def run_like_mps(place: Path, command: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "like_mps.py", command, *words], cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "float64" not in done.stdout + done.stderr
    return done.stdout


def validation(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["val/loss"] for record in records if "val/loss" in record]


def test_a_device_without_fp64_trains_resumes_samples_and_is_looked_at(
    tmp_path: Path, notes: Path, tiny_run, script
) -> None:
    new = ["attention.implementation=sdpa", "precision=fp32", "train.steps=8"]  # a CPU may choose bf16
    longer = [f"runs_dir={tmp_path / 'runs'}", "resume=auto", "train.steps=12"]
    run_like_mps(tmp_path, "train", *tiny_words(tmp_path, notes, "name=there", *new))
    run_like_mps(tmp_path, "train", "name=there", *longer)
    run = tmp_path / "runs" / "there"
    failed_extras = [log.read_text(encoding="utf-8") for log in run.glob("run.log")]
    assert not failed_extras and list(run.glob("**/*.html"))
    assert tiny_run("name=here", *new) == script("train")(["name=here", *longer]) == 0
    there, here = validation(run), validation(tmp_path / "runs" / "here")
    assert there and there == pytest.approx(here, rel=1e-4)
    where = f"checkpoint={run}"
    assert run_like_mps(tmp_path, "sample", where, "prompt=the", "max_new_tokens=4", "top_p=0.9").startswith("the")
    run_like_mps(tmp_path, "lens", where, "prompt=the end", f"out={tmp_path / 'lens.html'}")
    run_like_mps(tmp_path, "evaluate", where, "tasks=bpb", f"text={notes}")
    run_like_mps(tmp_path, "export", where, "to=hf", f"out={tmp_path / 'exported'}")
