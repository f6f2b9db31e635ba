"""Kills the rehearsal of bench/gpu.py at random moments: whatever it said that it measured must be in its result files.

    python bench/gpu_kill.py [--kills 22] [--parts loss optimizer generate checks attention] [--seconds 40]

Each part in turn is the first of a rehearsal. Every second kill is SIGKILL, to the driver alone; the others are SIGTERM. The
judge compares the log, line by line, with the file of records: each row of attention, each tile that was tuned, each
contestant of each round that was ended. The copy of a run's metrics must hold whole lines of the run's own file, and after
SIGTERM all of them. After SIGTERM the table must stand at the end of the log, and the exit code be 143; a rehearsal that has
run all its parts prints its table and ignores SIGTERM. Never may a process be left after ten seconds, or more than eight
files.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import RESULTS, ROOT, write_record
from gpu_parts import PARTS

MOST_FILES = 8
ROUND = re.compile(r"round (\d+): (.*): [\d.]+ tokens/s")
ATTENTION = re.compile(r"d +(\d+) T +(\d+) (\S.*?)  +forward .* TFLOP/s")
TUNED = re.compile(r"tuned d (\d+) T (\d+) (\w+): (\{.*\})")


def findings(folder: Path, scratch: Path, number: int, code: int) -> tuple[list[str], int]:
    """What is wrong after a kill, and the number of measurements that were said and found."""
    wrong = []
    log = next(folder.glob("*.log"), None)
    if len(files := [path for path in folder.rglob("*") if path.is_file()]) > MOST_FILES:
        wrong.append(f"{len(files)} files")
    wrong += [f"left running: {each}" for each in left_running(scratch)]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log else []
    path = next(folder.glob("gpu-*.json"), None)
    records = json.loads(path.read_text(encoding="utf-8")) if path else {}
    said = measurements_said(lines)
    held = measurements_held(records)
    wrong += [f"said but not held: {each}" for each in sorted(said - held)]
    wrong += wrong_metrics(folder, scratch, is_all=number == signal.SIGTERM)
    if number == signal.SIGTERM and lines:
        if code != 128 + signal.SIGTERM:
            wrong.append(f"exit code {code}")
        if not any(map(is_table, lines)):
            wrong.append("no table")
    return wrong, len(said)


def wrong_metrics(folder: Path, scratch: Path, is_all: bool) -> list[str]:
    """What is wrong with the copy of a run's metrics, which must be the beginning of the run's file, in whole lines."""
    written, copies = list(scratch.rglob("metrics.jsonl")), list(folder.glob("*-metrics.jsonl"))
    if not written:
        return []
    lines = written[0].read_bytes().splitlines(keepends=True)
    copied = copies[0].read_bytes().splitlines(keepends=True) if copies else []
    if copied != lines[: len(copied)] or (is_all and len(copied) < len(lines)):
        return [f"of {len(lines)} lines of metrics, {len(copied)} were copied, which are not the first ones"]
    return []


def is_table(line: str) -> bool:
    """Whether the table at the end of the log begins with this line, which is the name of the file of records."""
    return line.startswith("== ") and line.endswith(".json")


def measurements_said(lines: list[str]) -> set[tuple]:
    """From the log: rows of attention, tiles, and (record, contestant, rounds) of rounds after which another line came."""
    said: set[tuple] = set()
    command, in_round = "", []
    for line in lines:
        if is_table(line):
            break
        if line.startswith("== ") and (found := re.search(r"records/(\S+)\.json", line)):
            command, in_round = found[1], []
        elif found := ATTENTION.match(line):
            said.add((command, found[3].strip(), int(found[1]), int(found[2])))
        elif found := TUNED.match(line):
            said.add((command, found[3], int(found[1]), int(found[2]), *tile_of(ast.literal_eval(found[4]))))
        elif found := ROUND.match(line):
            index, name = int(found[1]), found[2]
            if in_round and in_round[0][0] < index:  # the round before is over, and was saved
                said |= {(command, each, before) for before, each in in_round if before > 0}
                in_round = []
            in_round.append((index, name))
    return said


def measurements_held(records: dict) -> set[tuple]:
    """The same from the file of records. Readings of the memory are said as a contestant, and held as a list."""
    held: set[tuple] = set()
    for command, record in records.items():
        for row in record.get("rows", []):
            if "kernel" in row and "m" in row:
                held.add((command, row["kernel"], row["width"], row["length"], *tile_of(row)))
            elif "implementation" in row:
                held.add((command, row["implementation"], row["width"], row["length"]))
        rounds = {name: len(row["rounds"]) for name, row in record.get("results", {}).items() if "rounds" in row}
        rounds["memory read, in GB"] = len(record.get("read_gigabytes_per_second", []))
        held |= {(command, name, index) for name, count in rounds.items() for index in range(1, count + 1)}
    return held


def tile_of(row: dict) -> tuple[int, ...]:
    return tuple(row[key] for key in ("m", "n", "warps", "stages"))


def wait_for_measurement(process: subprocess.Popen, folder: Path) -> None:
    """Until the rehearsal has said a measurement that must be held, or has ended."""
    while process.poll() is None:
        log = next(folder.glob("*.log"), None)
        if log and measurements_said(log.read_text(encoding="utf-8", errors="replace").splitlines()):
            return
        time.sleep(0.02)


def has_run_all(folder: Path, parts: list[str]) -> bool:
    """Whether each part has its outcome in the file of records."""
    path = next(folder.glob("gpu-*.json"), None)
    outcomes = json.loads(path.read_text(encoding="utf-8")).get("outcomes", {"parts": []}) if path else {"parts": []}
    return {row["part"] for row in outcomes["parts"]} == set(parts)


def parts_begun(folder: Path) -> list[str]:
    """The commands that had begun, in their order, by the names of their parts."""
    log = next(folder.glob("*.log"), None)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log else []
    return [found[1] for line in lines if (found := re.match(r"== (\w+): .* s at most\)$", line))]


def left_running(scratch: Path) -> list[str]:
    """Command lines of processes that still name the scratch folder, ten seconds after the kill at the latest."""
    for _ in range(20):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            if any(str(scratch).encode() in word for word in words) and int(path.parent.name) != os.getpid():
                found.append(b" ".join(words[:4]).decode())
        if not found:
            return []
        time.sleep(0.5)
    return found


def kill_once(index: int, chosen: argparse.Namespace, drawn: random.Random) -> dict:
    number = (signal.SIGKILL, signal.SIGTERM)[index % 2]
    first = chosen.parts[index % len(chosen.parts)]
    others = [part for part in chosen.parts if part != first]
    parts = [first, *drawn.sample(others, min(len(others), chosen.at_once - 1))]
    after = drawn.uniform(chosen.earliest, chosen.seconds)
    with tempfile.TemporaryDirectory() as place:
        folder, scratch = Path(place) / "results", Path(place) / "scratch"
        command = ["bash", "bench/gpu.sh", "--rehearse", "--output", str(folder), "--scratch", str(scratch), *parts]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, stdout=subprocess.DEVNULL
        )
        if chosen.measured_first:
            wait_for_measurement(process, folder)
        try:
            code = process.wait(after)
            ended = True
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            code = process.wait(30)
            ended = code == 0 and number == signal.SIGTERM and has_run_all(folder, parts)
        wrong, said = findings(folder, scratch, 0 if ended else number, code)
        begun = parts_begun(folder)
    row = {
        "parts": parts,
        "begun": begun,
        "signal": number.name,
        "after_s": round(after, 1),
        "ended_before": ended,
        "said": said,
    }
    return row | {"findings": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2 * len(PARTS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--at-once", type=int, default=2, help="parts in one rehearsal")
    parser.add_argument("--earliest", type=float, default=4, help="seconds before the first moment of a kill")
    parser.add_argument("--seconds", type=float, default=40, help="the last moment of a kill")
    parser.add_argument(
        "--measured-first",
        action="store_true",
        help="count these seconds from the first measurement, not from the start",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu-kill.json")
    chosen = parser.parse_args()
    drawn, rows = random.Random(chosen.seed), []
    for index in range(chosen.kills):
        rows.append(kill_once(index, chosen, drawn))
        print(rows[-1], flush=True)
        write_record(chosen.output, "gpu-kill", "cpu", {"kills": len(rows), "rows": rows})
    n_wrong = sum(bool(row["findings"]) for row in rows)
    print(f"{len(rows)} kills, {sum(row['said'] for row in rows)} measurements said, {n_wrong} kills with findings")
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
