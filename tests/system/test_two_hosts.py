"""torchrun across two hosts: network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.long
def test_two_hosts_train_the_run_of_one_process(tmp_path: Path) -> None:
    """DDP and FSDP2, fifty steps, within the script's tolerance. Skipped without network namespaces, but not in CI."""
    command = [sys.executable, str(BENCH / "two_hosts.py"), f"--output={tmp_path / 'two-hosts.json'}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode == 3 and not os.environ.get("CI"):
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout + ended.stderr
