"""End training commands at random moments, start them again until the run is done, compare with the uninterrupted run.

    python bench/kill.py --lives 300
    python bench/kill.py --lives 10 --cold compile=on
    python bench/kill.py --lives 60 --ranks 2 parallel=fsdp precision=fp32

A life is one command that something ends, at a moment drawn over the whole processor time of the uninterrupted command: SIGKILL,
SIGTERM, SIGHUP, a standard output whose reader ends, or a full disk. A quarter of the lives wait from that moment on for
a save to begin, and end inside it. Each run prepares its text, trains a vocabulary, trains the model, evaluates and saves;
it is started again with the same command until it is done, and must then be equal, bit for bit, to the uninterrupted run:
text, weights, optimizer state, records but for timings, samples. With several ranks, one process out of the ranks and
torchrun, drawn at random, gets the signal; torchrun may restart its ranks.

The words after the options go to train.py. The record holds the state: a command with --at-most ends after so many lives,
and the same command goes on. The disk is a small tmpfs, which needs the right to mount; without it no disk gets full.
Exit code 1 if any run ends differently, prints a traceback, exits with a code that does not belong to its end, or loses or
damages a checkpoint that it had.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, write_record

from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.cli import command_line
from andrea.cli.train import train_one
from andrea.config import UserError
from andrea.runtime.files import file_sha256
from andrea.training.records.run_folder import read_lines
from andrea.training.start import start  # noqa: F401 (loaded here for the forks)

TINY = [
    "data=text", "tokenizer=bpe", "tokenizer.vocab_size=300", "model.d_model=16", "model.n_layer=2", "model.n_head=2",
    "model.d_mlp=32", "model.sequence_length=32", "logger=none", "threads=1", "device=cpu", "train.tokens_per_step=64",
    "train.micro_batch=2", "train.steps=16", "train.log_every=1", "train.eval_every=4", "train.save_every=2",
    "train.attention_every=8", "train.sample_tokens=8", "train.keep=100", "compile=off", "name=a", "resume=auto",
]  # fmt: skip
TIMINGS = {"seconds", "train/tokens_per_second", "train/seconds_per_step", "train/peak_memory_bytes", "checkpoint"}
DISK_BYTES = 64 << 20
MOST_ENDS = 8  # of one run; its next command is left alone
GRACE_S = 120.0  # for what a command has started, after the command has ended
# How a command may end. A command that is done before its end exits with 0; torchrun exits with 1 for any failed rank.
ENDINGS = {
    "SIGKILL": {-signal.SIGKILL},
    "SIGTERM": {-signal.SIGTERM, 143},
    "SIGHUP": {-signal.SIGHUP, 129},
    "closed output": {0},
    "full disk": {2, 5},
}


# ------------------------------------------------------------------------------------------------ what is compared


def outcome(place: Path) -> dict[str, Any]:
    """What must be equal: the prepared text, the last weights and optimizer state, the state, records and samples."""
    run = place / "runs" / "a"
    (prepared,) = (path.parent for path in (place / "data").glob("*/meta.json"))
    last = checkpoints_of(run)[-1]
    state = json.loads((last / "state.json").read_text())
    config = {group: value for group, value in state["config"].items() if group not in ("runs_dir", "data_dir")}
    config["data"] = config["data"] | {"path": None}
    return {
        "text": {path.name: file_sha256(path) for path in sorted(prepared.iterdir()) if path.suffix != ".json"},
        "files": {path.name: file_sha256(path) for path in sorted(last.glob("*.safetensors"))},
        "state": {key: digest(value) for key, value in state.items() if key not in ("seconds", "run", "config")},
        "config": digest(config),
        "best": (run / "checkpoints" / "best").read_text(),
        "metrics": [digest(without_timings(record)) for record in read_lines(run / "metrics.jsonl")],
        "samples": [digest(without_timings(record)) for record in read_lines(run / "samples.jsonl")],
        "alerts": [digest(without_timings(record)) for record in read_lines(run / "health.jsonl")],
    }


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMINGS}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def whole_checkpoints(place: Path) -> tuple[set[str], int]:
    """The names of the checkpoints that a reader would look at, and how many of them are not what they should be."""
    names, believed_wrongly = set(), 0
    for path in checkpoints_of(place / "runs" / "a"):
        try:
            read_checkpoint(path)
            names.add(path.name)
        except UserError:
            believed_wrongly += 1
    return names, believed_wrongly


def phase(place: Path) -> str:
    """What the run was doing, judged by the files that it has made so far."""
    data, run = place / "data", place / "runs" / "a"
    if any((run / "checkpoints").glob("step-*/.writing-*")):
        return "consolidating"
    if any((run / "checkpoints").glob(".writing-*")):
        return "saving"
    if any(record.get("event") == "done" for record in read_lines(run / "metrics.jsonl")):
        return "done"
    if (run / ".lock").exists():
        return "training" if read_lines(run / "metrics.jsonl") else "building"
    if (data / ".lock").exists():
        return "encoding" if any(data.glob("*.partial/tokenizer.json")) else "vocabulary"
    return "resuming" if checkpoints_of(run) else "prepared" if any(data.glob("*/meta.json")) else "starting"


# ---------------------------------------------------------------------------------------------------- one command


class Forked:
    """train.py in a fork of this process, which has loaded torch: a fifth of the time of a new process."""

    def __init__(self, words: list[str], stdout: Any, stderr: Any, env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, stdout), (2, stderr)):
                os.dup2(file if isinstance(file, int) else file.fileno(), descriptor)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update(env)
            sys.argv, tempfile.tempdir = words, None
            self.train(words[1:])

    def train(self, words: list[str]) -> None:
        """In the fork: what train.py does, without the interpreter's start and end."""
        code: Any = 1
        try:
            command_line.run(lambda argv: train_one(argv).exit_code, words)
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code or 0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Command:
    """train.py in a session of its own. Its standard error goes to a file outside of the disk that gets full."""

    def __init__(self, words: list[str], place: Path, errors: Path, kind: str | None) -> None:
        self.place, self.errors, self.reader, self.left_over, self.most_busy_s = place, errors, None, 0, 0.0
        self.mark = f"ANDREA_LIFE={secrets.token_hex(8)}".encode()
        caches = {"XDG_CACHE_HOME": f"{place}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{place}/cache/inductor"}
        environment = os.environ | caches | {"TMPDIR": f"{place}/cache"}
        environment |= {"ANDREA_LIFE": self.mark.decode().partition("=")[2]}
        with open(errors, "w") as error_file, open(place / "log", "w") as log:
            stdout: Any = log
            if kind == "closed output":
                self.reader, stdout = os.pipe()
            if words[0] == sys.executable:
                self.process: Any = subprocess.Popen(
                    words,
                    stdout=stdout,
                    stderr=error_file,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            else:
                self.process = Forked(words, stdout, error_file, environment)
        if self.reader is not None:
            os.close(stdout)
            os.set_blocking(self.reader, False)

    def is_running(self) -> bool:
        if self.reader is not None:  # the pipe must not get full
            try:
                os.read(self.reader, 1 << 20)
            except BlockingIOError:
                pass
        return self.process.poll() is None

    def busy_s(self) -> float:
        """Processor time of the command and of its ranks so far: unlike the clock, other programs do not change it."""
        ticks, main = 0, self.process.pid
        with contextlib.suppress(OSError):
            ranks = Path(f"/proc/{main}/task/{main}/children").read_text().split()
            for pid in (main, *ranks):
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        self.most_busy_s = max(self.most_busy_s, ticks / os.sysconf("SC_CLK_TCK"))
        return self.most_busy_s

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition. Returns whether the command still runs."""
        while (running := self.is_running()) and not condition():
            time.sleep(0.001)
        return running

    def members(self, having: str = "") -> list[int]:
        """The processes that the command has started, itself included, that still run: they inherit its `mark`.

        having: the beginning of a line of their environment.
        """
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (path / "environ").read_bytes().split(b"\0")
                if self.mark in environment and any(line.startswith(having.encode()) for line in environment):
                    found.append(int(path.name))
        return found

    def close_output(self) -> None:
        if self.reader is not None:
            os.close(self.reader)
            self.reader = None

    def ended(self) -> int:
        """The exit code, once all that the command has started has ended too."""
        self.wait_until(lambda: False)
        deadline = time.monotonic() + GRACE_S
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left_over = len(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.close_output()
        return self.process.returncode


def fill_disk(place: Path, left_bytes: int) -> None:
    """Fill the disk, while the command writes to it, and give `left_bytes` back."""
    with open(place / "ballast", "wb", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while ballast.write(bytes(1 << 16)):
                pass
        ballast.truncate(max(0, ballast.tell() - left_bytes))


def live(words: list[str], place: Path, errors: Path, length_s: float, moment: random.Random, kinds: list[str]) -> dict:
    """One command with its end. Returns how it went."""
    kind, after_s, inside_a_save = moment.choice(kinds), moment.random() * length_s, moment.random() < 0.25
    by_torchrun = "torch.distributed.run" in words
    draw, left_bytes = moment.random(), moment.choice([0, 0, 1, 2, 8]) * 4096
    before, _ = whole_checkpoints(place)
    command = Command(words, place, errors, kind)
    running = command.wait_until(lambda: command.busy_s() > after_s)
    time.sleep(draw * 0.01)  # the system counts hundredths of a second
    if inside_a_save:
        checkpoints = place / "runs" / "a" / "checkpoints"
        running = command.wait_until(lambda: any(checkpoints.glob(".writing-*")))
        time.sleep(draw * 0.01)
    found, target = phase(place), "command"
    if running:
        if kind == "closed output":
            command.close_output()
        elif kind == "full disk":
            fill_disk(place, left_bytes)
        else:
            processes = [command.process.pid, *command.members("RANK=")]
            doomed = processes[int(draw * len(processes))]
            target = "command" if doomed == command.process.pid else "rank"
            try:
                os.kill(doomed, signal.Signals[kind])
            except ProcessLookupError:
                running = False
    code = command.ended()
    (place / "ballast").unlink(missing_ok=True)
    after, believed_wrongly = whole_checkpoints(place)
    allowed = {0} | (ENDINGS[kind] if running else set())
    if by_torchrun and running and kind != "closed output":
        allowed.add(1)
    said = errors.read_text(errors="replace")
    has_traceback = "Traceback" in said and (f'File "{ROOT}/' in said or not by_torchrun)  # torchrun prints its own
    row = {
        "kind": kind if running else None, "target": target, "phase": found, "at_s": round(command.busy_s(), 2),
        "inside_a_save": inside_a_save and running, "exit_code": code, "believed_wrongly": believed_wrongly,
        "lost": len(before - after), "left_over": command.left_over,
    }  # fmt: skip
    if kind == "full disk" and code:
        row["said"] = said.strip().rpartition("\n")[2][:300]
    if code not in allowed or has_traceback:
        row["finding"] = said[-3000:] or f"exit code {code}"
    return row


# -------------------------------------------------------------------------------------------------------- one run


def make_place(place: Path, cold: bool) -> None:
    """An empty place for a run: the text to train on, the caches of earlier runs unless `cold`."""
    for name in ("runs", "data", *(["cache"] if cold else [])):
        shutil.rmtree(place / name, ignore_errors=True)
    (place / "cache").mkdir(exist_ok=True)
    if not (place / "text").exists():
        (place / "text").mkdir()
        for name in ("bisect", "heapq", "copy"):
            path = place / "text" / f"{name}.py"
            path.write_bytes((Path(sysconfig.get_paths()["stdlib"]) / path.name).read_bytes()[:7000])
            os.utime(path, (0, 0))  # the time is part of the prepared folder's name


def uninterrupted(words: list[str], place: Path, cold: bool) -> dict[str, Any]:
    """The length and the outcome of the command that nothing ends. The first one fills the caches."""
    for _ in range(1 if cold else 2):
        make_place(place, cold)
        command = Command(words, place, place.parent / f"{place.name}.errors", None)
        command.wait_until(lambda: command.busy_s() < 0)
        if code := command.ended():
            raise SystemExit(f"the uninterrupted run exits with {code}: {command.errors.read_text()}")
    return {"length_s": command.most_busy_s, "outcome": outcome(place)}


def lived_run(
    words: list[str], place: Path, reference: dict, moment: random.Random, kinds: list[str], cold: bool
) -> dict:
    """A run that is started again until it is done."""
    make_place(place, cold)
    lives: list[dict] = []
    errors = place.parent / f"{place.name}.errors"
    while not (lives and lives[-1]["exit_code"] == 0):
        if len(lives) < MOST_ENDS:
            lives.append(live(words, place, errors, reference["length_s"], moment, kinds))
        else:
            lives.append(live(words, place, errors, 1e6, moment, kinds))
            if lives[-1]["exit_code"]:
                break
    different: Any = "not done"
    if not lives[-1]["exit_code"]:
        ours, theirs = outcome(place), reference["outcome"]
        different = [key for key in theirs if ours[key] != theirs[key]]
    return {"lives": lives, "different": different}


def summary_of(runs: list[dict]) -> dict[str, Any]:
    lives = [life for run in runs for life in run["lives"] if life["kind"]]
    count: dict[str, dict[str, int]] = {"kind": {}, "phase": {}}
    for life in lives:
        for key, counts in count.items():
            counts[life[key]] = counts.get(life[key], 0) + 1
    return {
        "lives": len(lives),
        "runs": len(runs),
        "equal": sum(run["different"] == [] for run in runs),
        "findings": sum("finding" in life for run in runs for life in run["lives"]),
        "believed_wrongly": sum(life["believed_wrongly"] for run in runs for life in run["lives"]),
        "lost": sum(life["lost"] for run in runs for life in run["lives"]),
        "inside_a_save": sum(life["inside_a_save"] for life in lives),
        **count,
    }


# ------------------------------------------------------------------------------------------------------------ main


def with_own_disk(argv: list[str]) -> None:
    """Start this program again, in a mount namespace in which it may mount its disk. Without the right, go on here."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if "ANDREA_OWN_DISK" in os.environ or subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode:
        return
    os.environ["ANDREA_OWN_DISK"] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--at-most", type=int, default=1 << 30, help="lives of this call; the same command goes on")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="each run begins with empty caches of compiled code")
    parser.add_argument("--warm", action="store_true", help="commands are forks of one process, which has loaded torch")
    parser.add_argument("--output", type=Path, help="default: bench/results/kill.json, kill-ranks.json")
    parser.add_argument("words", nargs="*", help="key=value for train.py")
    chosen = parser.parse_args()
    with_own_disk(sys.argv)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the commands inherit it; nohup would have it ignored
    name = "kill" if chosen.ranks == 1 else "kill-ranks"
    output = chosen.output or ROOT / "bench" / "results" / f"{name}.json"
    about = {
        "words": chosen.words,
        "ranks": chosen.ranks,
        "seed": chosen.seed,
        "cold": chosen.cold,
        "warm": chosen.warm,
    }
    earlier = json.loads(output.read_text()) if output.exists() else {}
    if {key: earlier.get(key) for key in about} != about:
        earlier = {}
    runs: list[dict] = earlier.get("rows", [])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder) / "disk"
        place.mkdir()
        kinds = list(ENDINGS)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
        if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
            kinds.remove("full disk")
        words = [str(ROOT / "train.py"), f"runs_dir={place}/runs", f"data_dir={place}/data", f"data.path={place}/text"]
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={chosen.ranks}",
            "--max-restarts=3",
        ]
        given = {word.split("=")[0] for word in chosen.words}
        words += [word for word in TINY if word.split("=")[0] not in given] + chosen.words
        if not chosen.warm:
            words = [sys.executable, *(torchrun if chosen.ranks > 1 else []), *words]
        reference = earlier.get("reference") or uninterrupted(words, place, chosen.cold)
        at_first = summary_of(runs)["lives"]
        while summary_of(runs)["lives"] < min(chosen.lives, at_first + chosen.at_most):
            moment = random.Random(f"{chosen.seed} {len(runs)}")
            run = lived_run(words, place, reference, moment, kinds, chosen.cold)
            for life in run["lives"]:
                print(
                    f"{len(runs):4} {life['kind'] or '-':14} {life['target']:8} {life['phase']:14} {life['at_s']:7.2f} s, exit code {life['exit_code']}"
                )
                if "finding" in life:
                    print(life["finding"])
            print(f"{len(runs):4} {'equal' if run['different'] == [] else run['different']}", flush=True)
            runs.append(run)
            summary = summary_of(runs)
            write_record(output, name, "cpu", {**about, **summary, "reference": reference, "rows": runs})
        subprocess.run(["umount", "--lazy", str(place)], stderr=subprocess.DEVNULL)
    summary = summary_of(runs)
    print(json.dumps(summary))
    bad = summary["findings"] or summary["believed_wrongly"] or summary["lost"] or summary["equal"] < len(runs)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
