"""Kill -9 a training run at random moments, some of them inside a save, resume it, compare with the uninterrupted run.

    python bench/kill.py --kills 50 model.n_layer=2 compile=off
    python bench/kill.py --kills 50 --ranks 2 model.n_layer=2 compile=off parallel=fsdp precision=fp32

Every run trains the default model on the default data with a checkpoint at every step; the words after the options go to
train.py. Every fourth kill waits for a save to begin and falls inside it. With several ranks one of them, drawn at random,
is killed, and nobody starts anything again: torchrun does (--max-restarts). Exit code 1 if any run ends differently from
the uninterrupted one, bit for bit, or if a checkpoint that was there at the kill is not whole at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, write_record

from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.config import UserError
from andrea.runtime.files import file_sha256
from andrea.training.records.run_folder import read_lines

ALWAYS = ["logger=none", "train.save_every=1", "train.eval_every=4", "train.log_every=1", "train.sample_tokens=0"]
TIMINGS = {"seconds", "train/tokens_per_second", "train/seconds_per_step", "train/peak_memory_bytes", "checkpoint"}


def outcome(run: Path) -> dict:
    """What must be equal: the last weights, the last optimizer state, every figure but timings."""
    last = checkpoints_of(run)[-1]
    records = [
        {key: value for key, value in record.items() if key not in TIMINGS}
        for record in read_lines(run / "metrics.jsonl")
    ]
    names = ("model.safetensors", "optimizer.safetensors")
    return {name: file_sha256(last / name) for name in names} | {"step": last.name, "metrics": records}


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.001)


def whole_ones(run: Path) -> tuple[set[str], int]:
    """The names of the checkpoints that a reader would look at, and how many of them are not what they should be."""
    names, believed_wrongly = set(), 0
    for path in checkpoints_of(run):
        try:
            read_checkpoint(path)
            names.add(path.name)
        except UserError:
            believed_wrongly += 1
    return names, believed_wrongly


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process numbers of what torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]


def kill_once(
    command: list[str], run: Path, steps: int, step_s: float, inside_a_save: bool, moment: random.Random, ranks: int
) -> dict:
    """Start, kill between the start and the last step, go on, look at what is left."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    writing, after = run / "checkpoints", moment.randrange(steps - 2)
    wait_for(lambda: writing.exists() and (not after or (writing / f"step-{after:08d}").exists()), process)
    time.sleep(moment.random() * step_s)
    if inside_a_save:
        wait_for(lambda: any(writing.glob(".writing-*")), process)
        time.sleep(moment.random() * 0.01)
    doomed = process.pid
    if ranks > 1 and process.poll() is None:
        doomed = moment.choice(ranks_of(process) or [process.pid])
    killed = process.poll() is None
    if killed:
        os.kill(doomed, signal.SIGKILL)
    half = len(list(writing.glob(".writing-*")))
    saved, believed_wrongly = whole_ones(run)
    code = process.wait()
    if ranks == 1 or doomed == process.pid:
        code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    at_the_end, also_wrongly = whole_ones(run)
    return {
        "killed": killed,
        "steps_saved": max((int(name[5:]) for name in saved), default=0),
        "half_written": half,
        "believed_wrongly": believed_wrongly + also_wrongly,
        "lost": len(saved - at_the_end),
        "exit_code": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="default: bench/results/kill.json, kill-ranks.json")
    parser.add_argument("words", nargs="*", help="key=value for train.py")
    chosen = parser.parse_args()
    moment, rows, equal = random.Random(chosen.seed), [], 0
    print(
        f"{'kill':>4} {'resumed from step':>18} {'inside a save':>14} {'wrongly believed':>17} {'lost':>5} {'equal':>6}"
    )
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        train = [str(ROOT / "train.py"), f"runs_dir={runs}", f"data_dir={place}/data", "resume=auto", "train.keep=100"]
        if chosen.ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={chosen.ranks}"]
            train = [*torchrun, "--max-restarts=3", *train]
        train = [sys.executable, *train]
        train += [*ALWAYS, f"train.steps={chosen.steps}", *chosen.words]
        for name in ("warm-up", "whole"):  # the first one prepares the data and fills the compiler's cache
            process = subprocess.Popen([*train, f"name={name}"], stdout=subprocess.DEVNULL)
            wait_for((runs / name / "checkpoints").exists, process)
            clock = time.monotonic()
            assert process.wait() == 0
            span_s = time.monotonic() - clock
        whole = outcome(runs / "whole")
        for number in range(chosen.kills):
            run, command = runs / f"killed-{number}", [*train, f"name=killed-{number}"]
            step_s = span_s / chosen.steps
            row = kill_once(command, run, chosen.steps, step_s, number % 4 == 0, moment, chosen.ranks)
            row["equal"] = row["exit_code"] == 0 and outcome(run) == whole
            rows.append(row)
            inside = "yes" if row["half_written"] else "-"
            print(
                f"{number:4} {row['steps_saved']:18} {inside:>14} {row['believed_wrongly']:17} {row['lost']:5}"
                f" {row['equal']!s:>6}",
                flush=True,
            )
            shutil.rmtree(run)
    equal = sum(row["equal"] for row in rows)
    inside = sum(bool(row["half_written"]) for row in rows)
    summary = {"kills": sum(row["killed"] for row in rows), "inside_a_save": inside, "equal": equal}
    summary |= {key: sum(row[key] for row in rows) for key in ("believed_wrongly", "lost")}
    print(json.dumps(summary))
    name = "kill" if chosen.ranks == 1 else "kill-ranks"
    about = {"words": chosen.words, "ranks": chosen.ranks, "steps": chosen.steps}
    output = chosen.output or ROOT / "bench" / "results" / f"{name}.json"
    write_record(output, name, "cpu", {**about, **summary, "rows": rows})
    sys.exit(0 if equal == len(rows) and not summary["believed_wrongly"] and not summary["lost"] else 1)


if __name__ == "__main__":
    main()
