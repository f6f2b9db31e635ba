"""How good the default model is after 60, 120 and 180 seconds of training: `python train.py`, nothing changed but the seed.

Evaluated every twentieth of the run, over the whole held-out split, outside the clock; between two evaluations the figure
is read off the straight line. Seconds are of training steps: compiling, evaluating and saving do not count. Several models
take turns within each seed. With --unseen, each model also scores Python code that is neither in its text nor held out
from it: a fixed choice of files of the packages installed beside torch.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, write_record

import andrea
from andrea.training.records.run_folder import read_lines

MOMENTS = (60.0, 120.0, 180.0)
QUIET = ["logger=none", "train.sample_tokens=0"]
UNSEEN_BYTES = 1_000_000  # at most this much of each package, from the beginning of its every tenth file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["andrea-nano"], help="values of model=")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--evaluations", type=int, default=20, help="in a run of --steps")
    parser.add_argument("--steps", type=int, default=700, help="the default's; checked")
    parser.add_argument("--unseen", nargs="+", default=[], help="installed packages whose Python code is scored too")
    parser.add_argument("--output", type=Path, default=RESULTS / "default-run-cpu.json")
    parser.add_argument("words", nargs="*", help="key=value for every run, after --")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        for model in chosen.models:
            rows.append(measure(chosen, model, seed))
            write_record(chosen.output, "default_run", "cpu", {"words": chosen.words, "rows": rows})
    for model in chosen.models:
        print_means(model, [row for row in rows if row["model"] == model])


def measure(chosen: argparse.Namespace, model: str, seed: int) -> dict[str, Any]:
    place = Path(tempfile.gettempdir()) / "andrea-default-run"
    shutil.rmtree(place / "runs", ignore_errors=True)
    command = [sys.executable, str(ROOT / "train.py"), f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}"]
    command += ["device=cpu", "train.max_minutes=null", "name=run", f"model={model}", f"seed={seed}"]
    command += [f"train.eval_every={-(-chosen.steps // chosen.evaluations)}"]
    subprocess.run([*command, *QUIET, *chosen.words], check=True, stdout=subprocess.DEVNULL)
    seen = [record for record in read_lines(place / "runs" / "run" / "metrics.jsonl") if "val/bpb" in record]
    assert seen[-1]["step"] == chosen.steps or chosen.words, f"the run has {seen[-1]['step']} steps: say --steps"
    line = [(record["seconds"], record["val/bpb"]) for record in seen]
    row: dict[str, Any] = {"model": model, "seed": seed, "at": {str(t): value_at(line, t) for t in MOMENTS}}
    row |= {"tokens_per_second": seen[-1]["tokens"] / seen[-1]["seconds"], "line": line}
    shown = ", ".join(f"{value:.4f} at {moment} s" for moment, value in row["at"].items() if value is not None)
    print(f"{model}, seed {seed}: {shown}, {line[-1][1]:.4f} at the end ({line[-1][0]:.0f} s)", flush=True)
    if chosen.unseen:
        trained = andrea.load(place / "runs" / "run", device="cpu")
        row["unseen"] = {package: trained.score(code_of(package)) for package in chosen.unseen}
        print("  " + ", ".join(f"{package} {value:.4f}" for package, value in row["unseen"].items()), flush=True)
    return row


def print_means(model: str, rows: list[dict[str, Any]]) -> None:
    for moment in MOMENTS:
        print(f"{model}, {moment:.0f} s: " + mean_of([row["at"][str(moment)] for row in rows]))
    print(f"{model}, end: " + mean_of([row["line"][-1][1] for row in rows]))
    for package in rows[0].get("unseen", {}):
        print(f"{model}, {package}: " + mean_of([row["unseen"][package] for row in rows]))


def mean_of(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"mean {statistics.mean(known):.4f}, {min(known):.4f} to {max(known):.4f}" if known else "not reached"


def code_of(package: str) -> str:
    """The text of every tenth Python file of an installed package, cut to UNSEEN_BYTES."""
    files = sorted((Path(sysconfig.get_paths()["purelib"]) / package).rglob("*.py"))[::10]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)[:UNSEEN_BYTES]


def value_at(line: list[tuple[float, float]], moment: float) -> float | None:
    """Between the evaluations before and after; the last one where the run had ended by then; None before the first."""
    for (before, high), (after, low) in zip(line, line[1:], strict=False):
        if before <= moment <= after:
            return high + (low - high) * (moment - before) / (after - before)
    return line[-1][1] if moment > line[-1][0] else None


if __name__ == "__main__":
    main()
