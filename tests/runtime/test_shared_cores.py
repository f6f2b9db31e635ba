"""Sharing the cores: what each command sets before torch loads OpenMP, and turns between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from andrea.runtime import shared_cores
from andrea.runtime.shared_cores import SPINS, TAKES_TURNS, VARIABLES, Turns, usable_cores

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


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="turns are taken on Linux only")


def joined(folder: Path, said: list[str] | None = None) -> Turns:
    turns = Turns()
    assert turns.join(
        threads=usable_cores(), on_wait=lambda: (said if said is not None else []).append("waits"), folder=folder
    )
    return turns


def test_two_processes_alternate_and_never_compute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "LONGEST_TURN_S", 0.0)
    pieces, inside, both_started = [], [], threading.Barrier(2)

    def work(name: str) -> None:
        turns = joined(tmp_path)  # a lock belongs to an open file, so that two threads stand for two processes
        both_started.wait()
        with turns.taken():
            for _ in range(30):
                turns.pass_on()
                inside.append(name)
                assert inside == [name]
                pieces.append(name)
                time.sleep(0.002)  # longer than the other process's interval between two looks at the lock
                inside.clear()

    workers = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    changes = sum(one != other for one, other in zip(pieces, pieces[1:], strict=False))
    assert sorted(pieces) == ["a"] * 30 + ["b"] * 30
    assert changes >= 30  # of at most 59, and 1 without turns; on a busy machine a thread may miss some of its turns


def test_a_turn_is_kept_for_a_while_if_nobody_or_somebody_waits(tmp_path: Path) -> None:
    turns, other = joined(tmp_path), joined(tmp_path)
    with turns.taken():
        kept_until = turns.until
        for _ in range(1000):
            turns.pass_on()
        assert turns.until == kept_until and turns.holds
    assert not turns.holds
    with other.taken():
        assert other.holds


def test_a_block_within_a_block_does_not_release_the_turn(tmp_path: Path) -> None:
    turns = joined(tmp_path)
    with turns.taken():
        with turns.taken():
            pass
        assert turns.holds
    assert not turns.holds


def test_a_holder_that_is_suspended_delays_others_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "PATIENCE_S", 0.05)
    said: list[str] = []
    holder, turns = joined(tmp_path), joined(tmp_path, said)
    with holder.taken():
        for _ in range(3):
            with turns.taken():
                assert not turns.holds
                assert turns.until > time.monotonic() + 30
    assert said == ["waits"]


def test_the_turn_of_a_killed_process_is_free(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from andrea.runtime.shared_cores import Turns, usable_cores\n"
        "turns = Turns(); turns.join(usable_cores(), lambda: None, Path(sys.argv[1]))\n"
        "with turns.taken(): print(turns.holds, flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    holder.kill()
    holder.wait()
    turns = joined(tmp_path)
    with turns.taken():
        assert turns.holds


def test_few_threads_take_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: 8)
    assert not Turns().join(4, lambda: None, tmp_path)
    assert Turns().join(5, lambda: None, tmp_path)


def test_processes_bound_to_different_cores_do_not_wait_for_each_other(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    turns: dict[int, Turns] = {}
    try:
        for core in sorted(cores)[:2]:
            os.sched_setaffinity(0, {core})
            turns[core] = joined(tmp_path, said := [])
        first, second = turns.values()
        with first.taken(), second.taken():
            assert first.holds and second.holds and not said
    finally:
        os.sched_setaffinity(0, cores)


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    folder.mkdir()
    folder.chmod(0o777)
    turns = Turns()
    assert not turns.join(usable_cores(), lambda: None, folder)
    with turns.taken():
        turns.pass_on()
        assert not turns.holds


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="one thread is more than half of one core")
def test_a_run_and_a_sample_take_turns_with_another_process(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    common = [f"runs_dir={tmp_path / 'runs'}", "device=cpu", f"threads={usable_cores()}"]
    tiny = [
        "data=text",
        f"data.path={ROOT / 'README.md'}",
        f"data_dir={tmp_path / 'data'}",
        "tokenizer=byte",
        "name=a",
    ]
    tiny += ["model.d_model=16", "model.n_layer=1", "model.n_head=1", "model.sequence_length=16", "compile=off"]
    tiny += ["train.steps=2", "train.tokens_per_step=32", "train.sample_tokens=0", "logger=none", "train.lens_prompt="]
    holder = joined(tmp_path / f"andrea-turns-{os.geteuid()}")
    commands = {"train.py": tiny, "sample.py": [f"checkpoint={tmp_path / 'runs' / 'a'}", "max_new_tokens=4"]}
    for script, words in commands.items():
        with holder.taken():
            running = subprocess.Popen(
                [sys.executable, ROOT / script, *common, *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert running.stdout is not None
            said = ""
            while TAKES_TURNS not in said and (line := running.stdout.readline()):
                said += line
        said += running.stdout.read()
        assert running.wait() == 0 and said.count(TAKES_TURNS) == 1, said
