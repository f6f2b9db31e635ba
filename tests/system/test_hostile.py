"""Hostile circumstances, each really brought about: whole `train.py` and `sample.py` processes on the tiny model.

What must hold: one line and the right exit code, nothing of what was whole is lost, nothing foreign is run.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_command, with_own_mounts
from safetensors.torch import load_file, save_file

from andrea.checkpoint import checkpoints_of, newest_run, read_checkpoint
from andrea.runtime.files import file_sha256
from andrea.text.shards import HEADER_BYTES, ShardWriter
from andrea.training.records.run_folder import read_lines

FAKETIME = [
    Path(folder) / "faketime" / "libfaketime.so.1"
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
]
LEAST_MEMORY_MB = 1024  # torch alone takes about half of it
QUIET = ["train.sample_tokens=0", "train.eval_every=100"]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    peak_mb: float


def run(command: list[str], **environment: str) -> Ended:
    """The process's end, and the most memory it held where it was `measured`."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    out, err = process.communicate(timeout=300)
    told = re.search(r"peak-kb=(\d+)$", err)
    return Ended(process.returncode, out, err[: told.start()] if told else err, int(told[1]) / 1024 if told else 0.0)


def measured(command: list[str]) -> list[str]:
    """`command` under a parent that says, last of all, how much memory it took at the most."""
    program = (
        "import resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:]).returncode\n"
        "sys.stderr.write('peak-kb=%d' % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.exit(code)"
    )
    return [sys.executable, "-c", program, *command]


def sample_command(checkpoint: Path) -> list[str]:
    words = [f"checkpoint={checkpoint}", "prompt=a", "max_new_tokens=2", "threads=1", "device=cpu"]
    return [sys.executable, str(ROOT / "sample.py"), *words]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder; the lock of a run says who had it last."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def own_shards(folder: Path) -> Path:
    """Token shards as someone else made them: bytes of a sentence."""
    folder.mkdir()
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 300, dtype=np.uint8)
    for name, tokens in (("train.bin", text), ("val.bin", text[:2000])):
        writer = ShardWriter(folder / name)
        writer.append(tokens)
        writer.close()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Path:
    """A place with the run `good`, of 12 steps and a checkpoint at 4, 8 and 12, on the notes."""
    place = tmp_path_factory.mktemp("trained")
    assert run(tiny_command(place, notes, "name=good", *QUIET)).code == 0
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained` that a test may ruin."""
    shutil.copytree(trained, tmp_path / "place")
    return tmp_path / "place"


def resume_command(place: Path, notes: Path, *words: str) -> list[str]:
    return tiny_command(place, notes, "name=good", "resume=auto", "train.steps=16", *QUIET, *words)


def one_line(ended: Ended) -> bool:
    return ended.err.count("\n") == 1 and "Traceback" not in ended.out + ended.err


# -------------------------------------------------------------------------------------------------- read-only folders


@pytest.mark.slow
@pytest.mark.parametrize(("part", "code"), [(".", 2), ("checkpoints", 5)])
def test_a_run_folder_that_is_read_only_at_a_resume(part: str, code: int, place: Path, notes: Path) -> None:
    """What cannot be begun is wrong input (2); what fails when it comes to saving is the disk (5)."""
    folder = place / "runs" / "good"
    before = contents(folder / "checkpoints")
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
    tried = with_own_mounts(mount, folder / part, resume_command(place, notes))
    assert tried.returncode == code and tried.stderr.count("\n") == 1, tried.stderr
    assert "Read-only file system" in tried.stderr and str(folder) in tried.stderr
    assert contents(folder / "checkpoints") == before


@pytest.mark.slow
def test_a_run_folder_that_becomes_read_only_on_the_way(tmp_path: Path, notes: Path) -> None:
    folder = tmp_path / "runs" / "a" / "checkpoints"
    folder.mkdir(parents=True)
    wait = 'until [ -e "$0/step-00000003" ]; do sleep 0.02; done; until mount -o remount,ro,bind "$0"; do :; done'
    mount = f'mount --bind "$0" "$0" && {{ ( {wait} ) >/dev/null 2>&1 & }}'
    words = ["name=a", "train.steps=100000", "train.save_every=3", *QUIET]
    tried = with_own_mounts(mount, folder, tiny_command(tmp_path, notes, *words))
    assert tried.returncode == 5 and tried.stderr.count("\n") == 1, tried.stderr
    assert "Read-only file system" in tried.stderr and "resume=auto" in tried.stderr
    saved = checkpoints_of(folder.parent)
    assert saved and all(read_checkpoint(path).step % 3 == 0 for path in saved)
    assert read_lines(folder.parent / "metrics.jsonl")


# ------------------------------------------------------------------------------------------------------- foreign data


def truncated(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 100)


def swapped(shard: Path) -> None:
    """Other tokens, of the same number and with the same time, as `cp -p` would leave them."""
    times, content = shard.stat(), bytearray(shard.read_bytes())
    tokens = np.frombuffer(content, dtype="<u2", offset=HEADER_BYTES)
    content[HEADER_BYTES:] = tokens[::-1].tobytes()
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def beyond_the_vocabulary(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[HEADER_BYTES : HEADER_BYTES + 2] = (257).to_bytes(2, "little")
    shard.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("ruin", [truncated, swapped, beyond_the_vocabulary])
def test_prepared_data_that_were_changed_are_refused(ruin: Callable[[Path], None], place: Path, notes: Path) -> None:
    (shard,) = place.glob("data/*/train-000000.bin")
    ruin(shard)
    before = contents(place)
    ended = run(resume_command(place, notes, f"data_dir={place / 'data'}"))
    assert ended.code == 2 and one_line(ended) and shard.name in ended.err, ended.err
    assert contents(place) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ruin", "said"),
    [(truncated, "train.bin is damaged"), (swapped, "fingerprint"), (beyond_the_vocabulary, "holds the token 257")],
)
def test_foreign_shards_that_were_changed_are_refused(ruin: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    shards = own_shards(tmp_path / "own")
    words = ["name=good", "data=shards", f"data.path={shards}", *QUIET]
    assert run(tiny_command(tmp_path, shards, *words, "train.steps=4")).code == 0
    before = contents(tmp_path / "runs")
    ruin(shards / "train.bin")
    ended = run(tiny_command(tmp_path, shards, *words, "train.steps=8", "resume=auto"))
    assert ended.code == 2 and one_line(ended) and said in ended.err, ended.err
    assert contents(tmp_path / "runs") == before


# ------------------------------------------------------------------------------------------------ damaged checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])  # each file: tests/checkpoint/test_folder.py
def test_a_flipped_bit_in_the_newest_checkpoint_takes_the_older_one(name: str, place: Path, notes: Path) -> None:
    *_, older, newest = checkpoints_of(place / "runs" / "good")
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    ended = run(resume_command(place, notes, "train.keep=100"))
    assert ended.code == 0 and ended.err == "", ended.err
    assert f"skipped: {newest}" in ended.out and f"resuming {older}" in ended.out
    assert read_checkpoint(newest).step == 12  # made again on the way, whole


def rewritten(checkpoint: Path, name: str, content: bytes) -> None:
    """A file of a checkpoint replaced by who can write its manifest too."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": file_sha256(checkpoint / name)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.canary}",)


def with_a_pickle(checkpoint: Path, canary: Path) -> None:
    rewritten(checkpoint, "model.safetensors", pickle.dumps(Bomb(canary)))


def with_a_torch_pickle(checkpoint: Path, canary: Path) -> None:
    torch.save(Bomb(canary), checkpoint / "model.safetensors")
    rewritten(checkpoint, "model.safetensors", (checkpoint / "model.safetensors").read_bytes())


def that_climbs_out(checkpoint: Path, canary: Path) -> None:
    outside = checkpoint.parent.parent / "outside"
    outside.write_bytes(b"secret")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["../../outside"] = {"bytes": 6, "sha256": file_sha256(outside)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def with_a_link(checkpoint: Path, canary: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.rename(checkpoint.parent.parent / "elsewhere")
    weights.symlink_to(checkpoint.parent.parent / "elsewhere")


def with_an_endless_manifest(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").symlink_to("/dev/zero")


def with_an_endless_header(checkpoint: Path, canary: Path) -> None:
    rewritten(checkpoint, "model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}")


def with_a_huge_model(checkpoint: Path, canary: Path) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"]["model"] |= {"n_layer": 4096, "sequence_length": 2**19, "d_model": 2**17, "n_head": 2**11}
    rewritten(checkpoint, "state.json", json.dumps(state).encode())


ATTACKS = [
    with_a_torch_pickle, with_a_huge_model, with_a_pickle, that_climbs_out, with_a_link, with_an_endless_manifest,
    with_an_endless_header,
]  # fmt: skip


# Each is a whole process. The first two do the greatest harm: they run a program, or take all memory.
@pytest.mark.parametrize(
    "attack", [*ATTACKS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in ATTACKS[2:])]
)
def test_an_attack_in_a_checkpoint_is_refused_and_runs_nothing(
    attack: Callable[[Path, Path], None], place: Path, tmp_path: Path
) -> None:
    checkpoint, canary = checkpoints_of(place / "runs" / "good")[-1], tmp_path / "canary"
    attack(checkpoint, canary)
    ended = run(measured(sample_command(checkpoint)))
    assert ended.code == 2 and one_line(ended) and checkpoint.name in ended.err, ended.err
    assert not canary.exists()
    assert 0 < ended.peak_mb < LEAST_MEMORY_MB


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "key"), [(with_a_torch_pickle, "resume"), (with_an_endless_header, "init_from")])
def test_training_refuses_an_attack_too(
    attack: Callable[[Path, Path], None], key: str, place: Path, notes: Path, tmp_path: Path
) -> None:
    checkpoint, canary = checkpoints_of(place / "runs" / "good")[-1], tmp_path / "canary"
    attack(checkpoint, canary)
    before = contents(place / "runs" / "good" / "checkpoints")
    words = ["name=new"] if key == "init_from" else []
    ended = run(measured(tiny_command(place, notes, f"{key}={checkpoint}", "train.steps=16", *words, *QUIET)))
    assert ended.code == 2 and one_line(ended) and checkpoint.name in ended.err, ended.err
    assert not canary.exists() and contents(place / "runs" / "good" / "checkpoints") == before
    assert 0 < ended.peak_mb < LEAST_MEMORY_MB


# --------------------------------------------------------------------------------------------------------- not finite


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrong"), [("model.safetensors", math.nan), ("optimizer.safetensors", math.inf)])
def test_a_number_that_is_not_finite_in_a_checkpoint_is_refused_and_never_saved_again(
    name: str, wrong: float, place: Path, notes: Path
) -> None:
    checkpoint = checkpoints_of(place / "runs" / "good")[-1]
    tensors = load_file(checkpoint / name)
    planted = next(key for key, tensor in tensors.items() if tensor.dim() == 2 and "mlp" in key)
    tensors[planted][0, 0] = wrong
    save_file(tensors, checkpoint / name)
    rewritten(checkpoint, name, (checkpoint / name).read_bytes())
    before = contents(place / "runs" / "good" / "checkpoints")
    ended = run(resume_command(place, notes, "train.save_every=1"))
    assert ended.code == 2 and one_line(ended) and planted in ended.err and "not finite" in ended.err, ended.err
    assert contents(place / "runs" / "good" / "checkpoints") == before


# ------------------------------------------------------------------------------------------------------------- memory

# Trains with only so many bytes of memory more than the process has when a step's passes begin, as under `ulimit -v`. The limit
# ends with the passes, or with the micro-batch that the third word says: where small allocations fail too, torch reports faults
# of its own.
WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import train
from andrea.cli.exit_code import run
from andrea.training.step import TrainingStep

def limit(extra=None):
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if extra is None else taken + extra, most))

class Step(TrainingStep):
    def accumulate(self, batch):
        limit(int(sys.argv[2]))
        try:
            return super().accumulate(batch)
        finally:
            limit()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "micro_batch" and value == int(sys.argv[3]):
            limit()

import andrea.training.start
andrea.training.start.TrainingStep = Step
run(train.main, sys.argv[4:])
"""


def with_little_memory(megabytes: int, until_micro_batch: int, place: Path, notes: Path, *words: str) -> Ended:
    wide = [
        "model.d_mlp=4096",
        "model.sequence_length=256",
        "train.tokens_per_step=16384",
        "train.steps=1",
        "train.log_every=1",
    ]
    command = tiny_command(place, notes, *wide, "precision=fp32", "train.micro_batch=64", *QUIET, *words)[2:]
    limits = [str(megabytes * 2**20), str(until_micro_batch)]
    return run([sys.executable, "-c", WITH_LITTLE_MEMORY, str(ROOT), *limits, *command])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process and tells its size")
@pytest.mark.slow
def test_a_limit_of_memory_halves_the_micro_batch(tmp_path: Path, notes: Path) -> None:
    ended = with_little_memory(700, 32, tmp_path, notes, "name=a")
    assert ended.code == 0 and not ended.err, ended.err
    assert "out of memory: the step is run again with train.micro_batch=32\n" in ended.out
    assert ended.out.count("out of memory") == 1, ended.out
    assert_complete(tmp_path / "runs" / "a", 1)


# Prints the compiled modules that a run loads after its first step began.
WITH_LATE_MODULES = """
import sys
sys.path.insert(0, sys.argv[1])
import train
from andrea.cli.exit_code import run
from andrea.training.step import TrainingStep

class Step(TrainingStep):
    early = set()

    def accumulate(self, batch):
        self.early.update(() if self.early else sys.modules)
        return super().accumulate(batch)

import andrea.training.start
andrea.training.start.TrainingStep = Step
try:
    run(train.main, sys.argv[2:])
finally:
    late = [module for name, module in sys.modules.items() if name not in Step.early]
    print("late:", sorted(module.__name__ for module in late if str(getattr(module, "__file__", "")).endswith(".so")))
"""


@pytest.mark.slow
def test_a_run_loads_its_compiled_modules_before_its_first_step(tmp_path: Path, notes: Path) -> None:
    """With little memory left such a module can no longer be loaded, and the save that needs it would be lost."""
    words = ["name=a", "train.steps=2", "train.save_every=1", "train.eval_every=1", *QUIET]
    ended = run([sys.executable, "-c", WITH_LATE_MODULES, str(ROOT), *tiny_command(tmp_path, notes, *words)[2:]])
    assert ended.code == 0 and "late: []" in ended.out, ended.out + ended.err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process and tells its size")
def test_too_little_memory_for_one_sequence_is_one_line(tmp_path: Path, notes: Path) -> None:
    ended = with_little_memory(120, 0, tmp_path, notes, "name=a", "model.d_mlp=65536", "train.tokens_per_step=512")
    assert ended.code == 2 and one_line(ended) and ended.err.startswith("error: out of memory"), ended.err
    assert "model" in ended.err and "ulimit -v" in ended.err


# --------------------------------------------------------------------------------------------------------------- data


@pytest.mark.slow
def test_data_that_are_cut_short_during_a_run_are_one_line_and_the_run_is_saved(tmp_path: Path, notes: Path) -> None:
    words = ["name=a", "train.steps=100000", "train.log_every=1", "train.save_every=100000", *QUIET]
    process = subprocess.Popen(
        tiny_command(tmp_path, notes, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert any(line.startswith("step") for line in process.stdout)
    (shard,) = (tmp_path / "data").rglob("train-*.bin")
    os.truncate(shard, HEADER_BYTES)
    out, err = process.communicate(timeout=60)
    run_folder = tmp_path / "runs" / "a"
    assert process.returncode == 2 and err.count("\n") == 1 and "was cut short while it was in use" in err, err
    saved, records = checkpoints_of(run_folder), read_lines(run_folder / "metrics.jsonl")
    assert [read_checkpoint(path).step for path in saved] == [records[-1]["step"]]
    shutil.rmtree(shard.parent)
    ended = run(tiny_command(tmp_path, notes, *words, "resume=auto", "train.max_minutes=0.01"))
    assert ended.code == 0 and f"resuming {saved[0]}" in ended.out, ended.err


# ---------------------------------------------------------------------------------------------------------- the clock


@pytest.mark.slow
def test_a_clock_that_jumps_back_two_hours_does_no_harm(tmp_path: Path, notes: Path) -> None:
    library = next((path for path in FAKETIME if path.exists()), None)
    if library is None:
        pytest.skip("libfaketime is not installed (apt-get install faketime)")
    offset = tmp_path / "offset"
    offset.write_text("+0")
    fake = {
        "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1",
    }  # fmt: skip
    words = ["name=a", "train.steps=60", "train.save_every=5", "train.log_every=1", "train.keep=100", *QUIET]
    command = tiny_command(tmp_path, notes, *words)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | fake
    )
    folder = tmp_path / "runs" / "a"
    until(lambda: len(checkpoints_of(folder)) >= 2, process)
    offset.write_text("-7200")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    records = [record for record in read_lines(folder / "metrics.jsonl") if "train/loss" in record]
    assert [record["step"] for record in records] == list(range(1, 61))
    assert all(record["train/seconds_per_step"] > 0 for record in records)
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and seconds[-1] < 300
    last = checkpoints_of(folder)[-1]
    two_hours_ago = time.time() - 7200
    os.utime(last, (two_hours_ago, two_hours_ago))  # as a disk dates it while the clock is behind
    ended = run(tiny_command(tmp_path, notes, *words, "resume=auto", "train.steps=62"))
    assert ended.code == 0 and f"resuming {last}: step 60" in ended.out, ended.err
    assert newest_run(tmp_path / "runs") == folder


def until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


# -------------------------------------------------------------------------------------------------------------- wandb


def says_once(out: str, fault: str, consequence: str) -> bool:
    return out.count(fault) == out.count(consequence) == 1 and out.count(" failed (") == 1


@pytest.mark.slow
@pytest.mark.long
def test_wandb_that_cannot_be_reached_is_one_line_and_the_run_is_kept_offline(tmp_path: Path, notes: Path) -> None:
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}  # port 9: nobody answers
    words = ["name=a", "logger=wandb", "logger.wandb=online", "train.log_every=1", *QUIET]
    ended = run(tiny_command(tmp_path, notes, *words), **server)
    assert ended.code == 0 and "Traceback" not in ended.out + ended.err, ended.err
    assert says_once(ended.out, "wandb failed (", "kept offline")
    assert list((tmp_path / "runs" / "wandb").glob("offline-run-*"))
    assert_complete(tmp_path / "runs" / "a", 12)


@pytest.mark.slow
def test_wandb_whose_process_is_killed_is_one_line_and_training_goes_on(tmp_path: Path, notes: Path) -> None:
    words = ["name=a", "logger=wandb", "logger.wandb=offline", "train.steps=60", "train.log_every=1", *QUIET]
    process = subprocess.Popen(
        tiny_command(tmp_path, notes, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: bool(read_lines(tmp_path / "runs" / "a" / "metrics.jsonl")), process)
    for core in wandb_processes(process.pid):
        os.kill(core, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in out + err, err
    assert says_once(out, "the logger Wandb failed (", "training continues"), out
    assert_complete(tmp_path / "runs" / "a", 60)


def wandb_processes(parent: int) -> list[int]:
    """wandb's service among the children of `parent`."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    found = [int(pid) for pid, of, words in rows if int(of) == parent and "wandb-core" in words]
    assert found, "wandb's service does not run"
    return found


def assert_complete(folder: Path, steps: int) -> None:
    records = read_lines(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "train/loss" in record] == list(range(1, steps + 1))
    assert records[-1]["event"] == "done"
