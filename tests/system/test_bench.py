"""The programs of bench/ that need a card still start and end here, under the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.untraced

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_attention_bench_measures_what_can_run(tmp_path):
    pytest.importorskip("triton")
    words = [
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--widths",
        "128",
        "--lengths",
        "16",
        "--tokens",
        "16",
        "--repeats",
        "1",
    ]
    command = [sys.executable, "bench/attention.py", *words, "--output", str(tmp_path / "a.json")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == [
        "triton", "triton + statistics", "triton atomic", "triton atomic + statistics",
        "triton by address", "triton as it trains",
    ]  # fmt: skip
    assert all(max(row["error_over_readable"]) < 3 and row["both_ms"] > 0 for row in rows)
    assert "sdpa_flash left out: implementation='sdpa_flash' cannot be used here: it needs a CUDA GPU" in done.stdout
