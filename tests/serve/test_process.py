"""The command as a process of its own, and the two programs of bench/ that attack and measure it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from conftest import ROOT
from tiny_checkpoint import make_model, write_model

pytestmark = [pytest.mark.slow, pytest.mark.untraced]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("stopped_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_command_says_where_it_serves_and_ends_with_its_signal(tmp_path, stopped_by, code):
    write_model(tmp_path, make_model().state_dict())
    command = [
        sys.executable,
        "-m",
        "andrea",
        "serve",
        f"runs_dir={tmp_path}",
        "port=0",
        "device=cpu",
        "served_name=mine",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT) as process:
        lines = []
        while "http://" not in "".join(lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        assert "32 texts at a time" in "".join(lines) and "MiB" in "".join(lines)
        url = re.search(r"http://\S+", lines[-1])[0]
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "mine"
        process.send_signal(stopped_by)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stderr.read()


def test_a_thousandth_of_the_hostile_requests_finds_nothing(tmp_path):
    command = [sys.executable, "bench/fuzz_server.py", "--requests", "300", "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["statuses"]["200"] > 3


def test_the_load_loses_no_text_and_every_text_is_the_engine_s(tmp_path):
    words = ["--vocabulary", "300", "--requests", "24", "--concurrent", "5", "--cancelled", "3", "--threads", "1"]
    command = [sys.executable, "bench/serve.py", *words, "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["lost"] == [] and record["equal"] == record["compared"] == 21
