"""Every check and measurement that needs a CUDA GPU, in the order of their importance, within a time limit.

    bash bench/gpu.sh [--seconds 540] [--output FOLDER] [PART…]   # all parts when none is named
    bash bench/gpu.sh --needs                  # the wheels that a machine without a network must be given
    bash bench/gpu.sh --rehearse               # everything at tiny sizes on the CPU, kernels under Triton's interpreter
    bash bench/gpu.sh --summary FILE.json      # the table of an earlier call, whatever ended it

Two or three files come into the output folder: a log, the records of all parts in one JSON file, and the metrics of the
real run. A record is written as soon as it is measured, so a call that is killed loses what it was measuring and no
more. The table comes at the end, also after a time-out, SIGTERM or Ctrl-C; after SIGKILL, `--summary` makes it. Runs,
prepared data and logs of single programs lie in a scratch folder outside the output folder.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import RECORDS_FILE, RESULTS, ROOT, add_record, die_with_parent, python_path, table_line, version_of
from gpu_parts import BUILT, PARTS, WHEELS, Call, Command, Part

from andrea.runtime.files import remove_unfinished

GRACE_SECONDS = 5  # from SIGTERM to SIGKILL
PROBE = """
import json, torch
assert torch.cuda.is_available(), "torch finds no CUDA GPU"
print(json.dumps([torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.__version__]))
"""


class Stopped(BaseException):
    """SIGTERM, Ctrl-C or a hang-up has come."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Outcome:
    """How a command ended: "done", "failed (exit code)", "out of time", "interrupted" or "skipped: why"."""

    part: str
    command: str
    outcome: str
    seconds: float = 0.0


class Driver:
    """Runs commands one after another, and keeps the log and the file of records."""

    def __init__(self, chosen: argparse.Namespace, call: Call) -> None:
        self.call = call
        self.until = time.monotonic() + chosen.seconds
        stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
        chosen.output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(chosen.output)  # of a call that was killed while writing
        name = f"gpu{'-rehearsal' if call.rehearsal else ''}-{stamp}"
        self.records, self.log_path = chosen.output / f"{name}.json", chosen.output / f"{name}.log"
        self.metrics = chosen.output / f"{name}-metrics.jsonl"
        self.log: TextIO = self.log_path.open("a", encoding="utf-8")
        self.outcomes: list[Outcome] = []

    def say(self, line: str) -> None:
        """To the log, and to the terminal while there is one."""
        self.log.write(line + "\n")
        self.log.flush()
        try:
            print(line, flush=True)
        except OSError:  # `| head` has ended
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def run_part(self, name: str, part: Part) -> None:
        missing = [module for module in part.modules if importlib.util.find_spec(module) is None]
        left = self.until - time.monotonic()
        if missing:
            self.note(Outcome(name, "", f"skipped: {', '.join(missing)} not installed (see --needs)"))
            return
        if left < part.least_seconds and not self.call.rehearsal:
            self.note(Outcome(name, "", f"skipped: {left:.0f} s left, it needs at least {part.least_seconds}"))
            return
        until = min(self.until, time.monotonic() + part.seconds)
        for command in part.commands(self.call):
            self.run(name, command, until)

    def run(self, part: str, command: Command, until: float) -> None:
        left = until - time.monotonic()
        if left < 2:
            self.note(Outcome(part, command.name, "skipped: the part's time is over"))
            return
        words = list(command.words)
        if words[0].startswith("bench/"):
            words += ["--output", str(self.call.scratch / "records" / f"{command.name}.json")]
        if command.tells_seconds:
            words += ["--seconds", f"{max(1.0, left - 10):.0f}"]
        self.say(f"\n== {part}: {shlex.join(words)} ({left:.0f} s at most)")
        started = time.monotonic()
        process = self.start(words)
        reader = threading.Thread(target=self.copy_output, args=(process,), daemon=True)
        reader.start()
        outcome = "interrupted"
        try:
            outcome = self.wait(process, command, until)
        finally:  # also where a signal has come
            end_group(process)
            reader.join(GRACE_SECONDS)
            self.follow(command)
            self.note(Outcome(part, command.name, outcome, round(time.monotonic() - started, 1)))

    def start(self, words: list[str]) -> subprocess.Popen:
        environment = os.environ | {RECORDS_FILE: str(self.records.resolve()), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = python_path()
        environment.pop("TRITON_INTERPRET", None)
        if self.call.rehearsal:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip

    def copy_output(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.say(line.rstrip("\n"))

    def wait(self, process: subprocess.Popen, command: Command, until: float) -> str:
        while (left := until - time.monotonic()) > 0:
            try:
                code = process.wait(timeout=min(1.0, left))
            except subprocess.TimeoutExpired:
                self.follow(command)
                continue
            return "done" if code == 0 else f"failed (exit code {code})"
        return "out of time"

    def follow(self, command: Command) -> None:
        """Copy what a run has recorded so far."""
        if command.metrics is not None and command.metrics.exists():
            shutil.copyfile(command.metrics, self.metrics)

    def note(self, outcome: Outcome) -> None:
        self.say(f"== {outcome.part} {outcome.command}: {outcome.outcome}, {outcome.seconds:.0f} s")
        self.outcomes.append(outcome)
        parts = [asdict(each) for each in self.outcomes]
        add_record(self.records, "outcomes", {"versions": versions(), "parts": parts})


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that decide what a part can do."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in ("torch", *WHEELS)}}


def end_group(process: subprocess.Popen) -> None:
    """End a command and all processes that it started, which are in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def summary(path: Path) -> Iterator[str]:
    """The table of what a file of records holds."""
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    yield f"\n== {path}"
    for outcome in records.pop("outcomes", {"parts": []})["parts"]:
        yield f"{outcome['part']:12}{outcome['command']:24}{outcome['outcome']}, {outcome['seconds']:.0f} s"
    for name, record in records.items():
        yield f"\n{name}: {record['machine']['device']}, {record['date']}"
        if record["bench"] == "attention":
            yield from attention_lines(record["rows"])
        elif record["bench"] == "checks":
            yield from checks_lines(record)
        elif "baseline" in record:
            yield f"{'':42}{'tokens/s':>12}{'ratio':>8}{'lowest':>8}{'highest':>9}"
            yield from (table_line(contestant, row) for contestant, row in record["results"].items())
        elif record["bench"] == "memory":
            ratios = [row["ratio"] for row in record["results"].values() if "ratio" in row]
            yield f"{len(record['results'])} cases; plan / measured {min(ratios, default=0):.2f} to {max(ratios, default=0):.2f}"
        elif record["bench"] == "async-save":
            yield f"excess of an asynchronous save / synchronous save: {record['ratio']:.2f}"


def attention_lines(rows: list[dict]) -> Iterator[str]:
    """Each contender's speed; of tiles, the three fastest of each kernel, and the best together against the kernel's own."""
    tiles: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("kernel") == "all":
            error = row["error_over_readable"]
            yield f"d {row['width']:3} T {row['length']:5} {row['tiles']:28} {row['both_ms']:.3f} ms  error ×{error:.2f}"
            continue
        if "kernel" in row:
            tiles.setdefault((row["width"], row["length"], row["kernel"]), []).append(row)
            continue
        ratio = f"{row['both_ratio']:.2f} of torch's best" if row["both_ratio"] else ""
        yield (
            f"d {row['width']:3} T {row['length']:5} {row['implementation']:28} forward {row['forward_tflops']:7.1f}, "
            f"both {row['both_tflops']:7.1f} TFLOP/s  {ratio}  error ×{max(row['error_over_readable']):.2f}"
        )
    for (width, length, kernel), candidates in tiles.items():
        for row in sorted(candidates, key=lambda row: row["ms"])[:3]:
            tile = f"({row['m']}, {row['n']}, {row['warps']} warps, {row['stages']} stages)"
            yield f"d {width:3} T {length:5} {kernel:8} {tile:34} {row['ms']:.3f} ms"


def checks_lines(record: dict) -> Iterator[str]:
    rows = record["rows"]
    for name in dict.fromkeys(row["check"] for row in rows):
        passes = [row["passes"] for row in rows if row["check"] == name]
        yield f"{name:32} {sum(passes):4} passed, {len(passes) - sum(passes):3} failed"
    yield from (f"FAILED {row['check']}: {row['case']}: {row.get('why', '')}" for row in rows if not row["passes"])


def needs() -> Iterator[str]:
    """The wheels that a bare machine without a network must be given."""
    found = {
        name: version_of(name) if importlib.util.find_spec(module) else None for name, (module, _) in WHEELS.items()
    }
    yield "torch itself is taken as given. Beside it (here: the version of this environment):"
    for name, (_, parts) in WHEELS.items():
        yield f"  {name:24}{found[name] or 'MISSING':12} {parts}"
    yield "Where there is a network, for the machine's Python and processor (here 3.12 on x86-64). antlr4-python3-runtime has no"
    yield "wheel. It is plain Python, so one that is built anywhere serves everywhere. pip adds what the others need in turn:"
    yield f"  pip wheel --no-deps -w wheels {BUILT}=={found[BUILT] or '4.9.3'}"
    yield "  pip download --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\"
    yield "      --platform manylinux2014_x86_64 --find-links wheels -d wheels \\"
    pinned = [f"{name}=={here}" if here else name for name, here in found.items() if name not in (BUILT, "triton")]
    yield f"      {' '.join(pinned)}"
    yield "triton comes with a CUDA build of torch, which needs that very version; add triton==VERSION for another build."
    yield "On the machine, which PYTHONPATH then tells where they are:"
    yield "  pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"in this order: {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=86400, help="of the whole call; a part has its own limit too")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--scratch", type=Path, help="folder for runs and data; default: a temporary one, removed at the end"
    )
    parser.add_argument("--shards", type=Path, help="prepared token shards for the real run")
    parser.add_argument("--needs", action="store_true", help="list the wheels that a bare machine must be given")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the table of a file of records")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return chosen


def find_gpu(driver: Driver) -> None:
    """Names the GPU in the log."""
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(found.stderr.strip().rpartition("\n")[2])
    name, capability, torch_version = json.loads(found.stdout.strip().rpartition("\n")[2])
    driver.say(f"{name}, compute capability {capability[0]}.{capability[1]}, torch {torch_version}")


def main() -> int:
    chosen = parse()
    if chosen.needs or chosen.summary:
        print("\n".join(needs() if chosen.needs else summary(chosen.summary)))
        return 0
    scratch = chosen.scratch or Path(tempfile.mkdtemp(prefix="andrea-gpu-"))
    call = Call(scratch.resolve(), chosen.rehearse, chosen.shards and chosen.shards.resolve())
    driver = Driver(chosen, call)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, raise_stopped)
    code = 0
    try:
        if not chosen.rehearse:
            find_gpu(driver)
        for name, part in PARTS.items():
            if not chosen.parts or name in chosen.parts:
                driver.run_part(name, part)
    except Stopped as stopped:
        code = 128 + stopped.number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the table is being printed
    for line in summary(driver.records):
        driver.say(line)
    if chosen.scratch is None:
        shutil.rmtree(scratch, ignore_errors=True)
    failed = any(outcome.outcome != "done" for outcome in driver.outcomes)
    return code or int(failed)


def raise_stopped(number: int, frame: object) -> None:
    raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main())
