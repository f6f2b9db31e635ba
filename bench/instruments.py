"""What the samples, health's texts and the lens cost: whole default runs with and without them, interleaved.

python bench/instruments.py                          # three rounds of two runs, each `python train.py` of 3 to 4 minutes
python bench/instruments.py --before OTHER_CHECKOUT  # also the default run of another checkout of this project

Every run is a process of its own, timed from its start to its exit, with an empty compiler cache. The data are prepared
once before. Each finished round is written, and an interrupted study continues after it. The runs with everything are
kept, so that `python bench/health.py --runs` can check them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import RESULTS, ROOT, write_record

FIRST_SEED = 1337  # the default; each round has its own
WITHOUT = ["train.sample_tokens=0"]


def timed(checkout: Path, name: str, words: list[str], folder: Path) -> float:
    """Seconds of one whole run. An older run of the same name is removed first."""
    caches = folder / "caches"
    for old in (caches, folder / "runs" / name):
        shutil.rmtree(old, ignore_errors=True)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches), "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(checkout / "train.py"), f"runs_dir={folder / 'runs'}", f"name={name}"]
    command += ["train.max_minutes=null", *words]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, whose default run is timed as well")
    parser.add_argument("--folder", type=Path, default=Path("runs/instruments"), help="of the runs")
    parser.add_argument("--output", type=Path, default=RESULTS / "instruments-cpu.json")
    parser.add_argument("words", nargs="*", help="key=value of every run")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    folder = chosen.folder.resolve()
    variants = {"with": (ROOT, []), "without": (ROOT, WITHOUT)}
    if chosen.before:
        variants["before"] = (chosen.before.resolve(), [])
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    if chosen.output.exists():
        seconds = json.loads(chosen.output.read_text(encoding="utf-8"))["seconds"]
    timed(ROOT, "prepare", ["train.steps=1", "compile=off", *chosen.words], folder)
    for number in range(1 + len(seconds["with"]), chosen.rounds + 1):
        order = list(variants) if number % 2 else list(reversed(variants))
        took = {}
        for name in order:
            checkout, words = variants[name]
            words = [*chosen.words, *words, f"seed={FIRST_SEED + number - 1}"]
            took[name] = timed(checkout, f"{name}-{number}", words, folder)
            print(f"round {number}: {name}: {took[name]:.1f} s", flush=True)
        for name in variants:
            seconds[name].append(took[name])
        ratios = {
            name: [a / b for a, b in zip(seconds["with"], seconds[name], strict=True)]
            for name in variants
            if name != "with"
        }
        write_record(chosen.output, "instruments", "cpu", {"words": chosen.words, "seconds": seconds, "ratios": ratios})
        for name, each in ratios.items():
            print(f"with / {name}: median {statistics.median(each):.3f}, " + ", ".join(f"{r:.3f}" for r in each))


if __name__ == "__main__":
    main()
