"""Training and its results in a Python that lacks what Windows lacks (tests/windows_like.py says how far that goes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, tiny_words

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the imitation reads /proc")]


def test_a_run_is_trained_resumed_sampled_shown_exported_renamed_and_deleted(tmp_path: Path, notes: Path) -> None:
    places, of_run = [f"runs_dir={tmp_path / 'runs'}"], f"checkpoint={tmp_path / 'runs' / 'one'}"
    commands = [
        ["train", "name=one", *tiny_words(tmp_path, notes, "device=cpu", "train.steps=8", "compile=auto")],
        ["train", f"resume={tmp_path / 'runs' / 'one'}", "train.steps=12"],
        ["sample", of_run, "prompt=def ", "max_new_tokens=4", "device=cpu"],
        ["lens", of_run, "prompt=def f", "device=cpu", f"out={tmp_path / 'lens.html'}"],
        ["export", of_run, "to=hf", f"out={tmp_path / 'exported'}"],
        ["runs", "rename=one", "to=two", *places],
    ]
    deletes = ["runs", "delete=two", "confirm=true", *places]

    def run(commands: list[list[str]]) -> str:
        command = [sys.executable, str(ROOT / "tests" / "windows_like.py"), json.dumps(commands)]
        # The encoding of a file or pipe on Windows in Western Europe
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "cp1252"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, (done.stdout + done.stderr).decode("cp1252")
        return done.stdout.decode("cp1252")

    said = run(commands)
    assert "done at step 8 of 8" in said and "done at step 12 of 12" in said and "Visual Studio" in said
    renamed = tmp_path / "runs" / "two"
    records = [json.loads(line) for line in (renamed / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert max(record["step"] for record in records) == 12
    assert (tmp_path / "lens.html").stat().st_size and (tmp_path / "exported" / "model.safetensors").stat().st_size
    run([deletes])
    assert not renamed.exists() and not list((tmp_path / "runs").glob(".writing-*"))


def test_a_lock_of_windows_excludes_other_processes(tmp_path: Path) -> None:
    """The holder's form is that of Windows, its lock the one of an open file."""
    program = (
        "import sys; from pathlib import Path; import windows_like\n"
        "from andrea.runtime.files import Locked, exclusive_lock, is_locked\n"
        "path = Path(sys.argv[1])\n"
        "with exclusive_lock(path):\n"
        "    assert is_locked(path)\n"
        "    try:\n"
        "        with exclusive_lock(path): raise SystemExit('locked twice')\n"
        "    except Locked as holder: print(holder)\n"
        "assert not is_locked(path) and not path.exists()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", program, str(tmp_path / ".lock")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("process ")
