"""Waiting threads of OpenMP: what each command sets before torch loads OpenMP, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andrea.runtime.openmp import SPINS, VARIABLES, describe_waiting

ROOT = Path(__file__).resolve().parents[2]
CONSOLE_SCRIPT = "import sys; from andrea.__main__ import start; sys.argv[1:] = ['train', 'dry_run=true']; start()"
COMMANDS = {
    "train.py": ["train.py", "dry_run=true"],
    "sample.py": ["sample.py"],
    "module": ["-m", "andrea", "lens", "prompt=def"],
    "console script": ["-c", CONSOLE_SCRIPT],
}
STAND_IN = """
import os, sys
print([os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")], file=sys.stderr, flush=True)
os._exit(7)
"""


def seen_by_torch(command: list[str], folder: Path, **variables: str) -> str:
    """The two variables at the moment when the command first imports torch, for which a file in `folder` stands in."""
    (folder / "torch.py").write_text(STAND_IN, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr
    return ended.stderr.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_limits_the_spins_before_torch_is_loaded(name: str, tmp_path: Path) -> None:
    assert seen_by_torch(COMMANDS[name], tmp_path) == f"['{SPINS}', None]"


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    command = COMMANDS["train.py"]
    assert seen_by_torch(command, tmp_path, GOMP_SPINCOUNT="7") == "['7', None]"
    assert seen_by_torch(command, tmp_path, OMP_WAIT_POLICY="active") == "[None, 'active']"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({"GOMP_SPINCOUNT": f"{SPINS}"}, f"sleeps after {SPINS:,} spins"),
        ({"GOMP_SPINCOUNT": "7"}, "as set in the environment (GOMP_SPINCOUNT=7)"),
        ({"OMP_WAIT_POLICY": "active"}, "as set in the environment (OMP_WAIT_POLICY=active)"),
    ],
)
def test_a_run_says_how_its_threads_wait(variables: dict, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert expected in describe_waiting() and bool(expected) == bool(describe_waiting())
