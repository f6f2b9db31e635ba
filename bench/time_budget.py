"""What planning by time costs: `train.max_minutes` against a run of the same number of steps that was planned from the start.

Both runs have the same seed and the same `compile`. The figure is the bits per byte of the last evaluation, over the whole
held-out split.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, ROOT, write_record

from andrea.training.records.run_folder import read_lines

QUIET = ["logger=none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "time-budget-cpu.json")
    parser.add_argument("words", nargs="*", help="key=value for every run")
    chosen = parser.parse_args()
    place = Path(tempfile.gettempdir()) / "andrea-time-budget"
    run_once(place, "prepare", ["train.steps=1", "compile=off", *chosen.words])  # the text is prepared before the clock
    rows = []
    for seed in chosen.seeds:
        by_time = run_once(place, "by-time", [f"seed={seed}", f"train.max_minutes={chosen.minutes}", *chosen.words])
        same = [f"seed={seed}", f"train.steps={by_time['steps']}", f"compile={by_time['compile']}", *chosen.words]
        by_steps = run_once(place, "by-steps", same)
        row = {"seed": seed, "by_time": by_time, "by_steps": by_steps, "difference": by_time["bpb"] - by_steps["bpb"]}
        rows.append(row)
        print(
            f"seed {seed}: {by_time['bpb']:.4f} bits/byte by time ({by_time['ended']} at step {by_time['step']} of "
            f"{by_time['steps']} after {by_time['wall_s']:.0f} s), {by_steps['bpb']:.4f} with as many steps planned, "
            f"difference {row['difference']:+.4f}",
            flush=True,
        )
    differences = [row["difference"] for row in rows]
    print(f"difference: mean {statistics.mean(differences):+.4f}, {min(differences):+.4f} to {max(differences):+.4f}")
    write_record(chosen.output, "time_budget", "cpu", {"minutes": chosen.minutes, "words": chosen.words, "rows": rows})


def run_once(place: Path, name: str, words: list[str]) -> dict[str, Any]:
    """Train; the planned steps, where and how the run ended, its result, and the seconds of the whole command."""
    shutil.rmtree(place / "runs" / name, ignore_errors=True)
    command = [sys.executable, str(ROOT / "train.py"), f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}"]
    clock = time.monotonic()
    subprocess.run([*command, "device=cpu", f"name={name}", *QUIET, *words], check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - clock
    config = yaml.safe_load((place / "runs" / name / "config.yaml").read_text(encoding="utf-8"))
    last = read_lines(place / "runs" / name / "metrics.jsonl")[-1]
    return {
        "steps": config["train"]["steps"],
        "compile": config["compile"],
        "step": last["step"],
        "ended": last["event"],
        "bpb": last["val/bpb"],
        "wall_s": wall_s,
    }


if __name__ == "__main__":
    main()
