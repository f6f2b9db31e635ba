"""Kill -9 a training run at random moments, some of them inside a save, resume it, compare with the undisturbed run.

    python bench/kill.py --kills 20 model.n_layer=2 compile=off

Every run trains the default model on the default data with a checkpoint at every step; the words after the options go to
train.py. Every fourth kill waits for a save to begin and falls inside it. Exit code 1 if any run ends differently.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, write_record

from andrea.checkpoint import checkpoints_of, file_sha256, newest_whole, read_checkpoint
from andrea.config import UserError
from andrea.training.loggers import read_lines

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


def kill_once(command: list[str], run: Path, span_s: float, inside_a_save: bool, moment: random.Random) -> dict:
    """Start, kill, look at what is left; returns what was found. `span_s` is how long a whole run takes from its folder on."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    writing = run / "checkpoints"
    wait_for(writing.exists, process)
    time.sleep(moment.random() * span_s)
    if inside_a_save:
        wait_for(lambda: any(writing.glob(".writing-*")), process)
        time.sleep(moment.random() * 0.01)
    process.kill()
    process.wait()
    saved, believed_wrongly = checkpoints_of(run), 0
    for path in saved:
        try:
            read_checkpoint(path)
        except UserError:
            believed_wrongly += 1
    half = len(list(writing.glob(".writing-*")))
    newest = newest_whole(run)
    return {
        "finished_before": process.returncode == 0,
        "steps_saved": newest.step if newest else 0,
        "half_written": half,
        "believed_wrongly": believed_wrongly,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "kill.json")
    parser.add_argument("words", nargs="*", help="key=value for train.py")
    chosen = parser.parse_args()
    moment, rows, equal = random.Random(chosen.seed), [], 0
    print(f"{'kill':>4} {'resumed from step':>18} {'inside a save':>14} {'wrongly believed':>17} {'equal':>6}")
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        train = [sys.executable, str(ROOT / "train.py"), f"runs_dir={runs}", f"data_dir={place}/data", "resume=auto"]
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
            row = kill_once(command, run, 0.8 * span_s, number % 4 == 0, moment)
            resumed = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
            row["equal"] = resumed == 0 and outcome(run) == whole
            rows.append(row)
            inside = "yes" if row["half_written"] else "-"
            print(
                f"{number:4} {row['steps_saved']:18} {inside:>14} {row['believed_wrongly']:17} {row['equal']!s:>6}",
                flush=True,
            )
            shutil.rmtree(run)
    equal = sum(row["equal"] for row in rows)
    inside = sum(bool(row["half_written"]) for row in rows)
    summary = {"kills": len(rows), "inside_a_save": inside, "equal": equal,
               "believed_wrongly": sum(row["believed_wrongly"] for row in rows)}  # fmt: skip
    print(json.dumps(summary))
    write_record(chosen.output, "kill", "cpu", {"words": chosen.words, "steps": chosen.steps, **summary, "rows": rows})
    sys.exit(0 if equal == len(rows) and not summary["believed_wrongly"] else 1)


if __name__ == "__main__":
    main()
