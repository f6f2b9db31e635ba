"""Sharing the cores: what each command sets before torch loads OpenMP, and waits that shorten beside other programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from andrea.runtime.shared_cores import SPINS, VARIABLES

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


# A process of its own, whose threads start and stop as they will: it prints what it saw as JSON.
BESIDE = """
import json, os, subprocess, sys, threading, time
from andrea.runtime import shared_cores
shared_cores.limit_spins()
import torch
shared_cores.PERIOD_S = 0.1
cores = sorted(os.sched_getaffinity(0))[:int(sys.argv[1])]
os.sched_setaffinity(0, cores)
before = shared_cores.waited_ns()
torch.set_num_threads(2)

def short_waits():
    return any(thread.name == "short waits" for thread in threading.enumerate())

def figures():
    matrix = torch.arange(90000.0).view(300, 300).sin()
    for _ in range(5):
        matrix = (matrix @ matrix).tanh().softmax(1)
    return matrix.double().sum().item()

def used():
    return sorted({core for thread in os.listdir("/proc/self/task") for core in os.sched_getaffinity(int(thread))})

alone = figures()
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
beside, deadline = [], time.monotonic() + 60
with shared_cores.sharing_cores():
    shortened = False
    while not shortened and time.monotonic() < deadline:
        beside.append(figures())
        shortened = short_waits() and len(used()) == 1
    if sys.argv[2] == "until they end":
        for each in busy:
            each.kill()
        # What other tests compute on these cores is left out from now on.
        shared_cores.idle_seconds = lambda cores: [time.monotonic()] * len(cores)
        while short_waits() and time.monotonic() < deadline:
            time.sleep(0.05)  # without work there is nothing to wait for
for each in busy:
    each.kill()
time.sleep(0.1)  # for the thread that held the waits short
lengthened = not short_waits() and used() == cores
print(json.dumps([alone, beside, shortened, lengthened, shared_cores.waited_ns() > before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize(("cores", "watched"), [(1, "until they end"), (2, "until they end"), (2, "while they go on")])
def test_waits_shorten_beside_busy_programs_and_lengthen_after_them_and_no_figure_changes(
    cores: int, watched: str
) -> None:
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip("too few cores")
    command = [sys.executable, "-c", BESIDE, str(cores), watched]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    alone, beside, *held = json.loads(ended.stdout)
    assert held == [True] * 3
    assert set(beside) == {alone}
