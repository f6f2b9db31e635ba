"""How good the default model is after 60, 120 and 180 seconds of training: `python train.py`, nothing changed but the seed.

Evaluated every twentieth of the run, over the whole held-out split, outside the clock; between two evaluations the figure
is read off the straight line. Seconds are of training steps: compiling, evaluating and saving do not count.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import RESULTS, ROOT, write_record

from andrea.training.records.run_folder import read_lines

MOMENTS = (60.0, 120.0, 180.0)
QUIET = ["logger=none", "train.sample_tokens=0", "train.lens_prompt=", "health.samples=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--evaluations", type=int, default=20, help="in a run of --steps")
    parser.add_argument("--steps", type=int, default=700, help="the default's; checked")
    parser.add_argument("--output", type=Path, default=RESULTS / "default-run-cpu.json")
    parser.add_argument("words", nargs="*", help="key=value for every run")
    chosen = parser.parse_args()
    place = Path(tempfile.gettempdir()) / "andrea-default-run"
    rows = []
    for seed in chosen.seeds:
        shutil.rmtree(place / "runs", ignore_errors=True)
        command = [sys.executable, str(ROOT / "train.py"), f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}"]
        command += [
            "device=cpu",
            "name=run",
            f"seed={seed}",
            f"train.eval_every={-(-chosen.steps // chosen.evaluations)}",
        ]
        subprocess.run([*command, *QUIET, *chosen.words], check=True, stdout=subprocess.DEVNULL)
        records = read_lines(place / "runs" / "run" / "metrics.jsonl")
        seen = [record for record in records if "val/bpb" in record]
        assert seen[-1]["step"] == chosen.steps or chosen.words, (
            f"the default has {seen[-1]['step']} steps: say --steps"
        )
        line = [(record["seconds"], record["val/bpb"]) for record in seen]
        row = {"seed": seed, "at": {str(moment): value_at(line, moment) for moment in MOMENTS}, "line": line}
        rows.append(row)
        shown = ", ".join(f"{value:.4f} at {moment} s" for moment, value in row["at"].items() if value is not None)
        print(f"seed {seed}: {shown}, {line[-1][1]:.4f} at the end ({line[-1][0]:.0f} s)", flush=True)
    for moment in MOMENTS:
        values = [row["at"][str(moment)] for row in rows if row["at"][str(moment)] is not None]
        if values:
            print(f"{moment:.0f} s: mean {statistics.mean(values):.4f}, {min(values):.4f} to {max(values):.4f}")
    write_record(chosen.output, "default_run", "cpu", {"words": chosen.words, "rows": rows})


def value_at(line: list[tuple[float, float]], moment: float) -> float | None:
    """Between the evaluations before and after; the last one where the run had ended by then; None before the first."""
    for (before, high), (after, low) in zip(line, line[1:], strict=False):
        if before <= moment <= after:
            return high + (low - high) * (moment - before) / (after - before)
    return line[-1][1] if moment > line[-1][0] else None


if __name__ == "__main__":
    main()
