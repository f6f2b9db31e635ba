"""Training and generation on a CPU by two checkouts of this project, in turns: what did a change cost?

    git worktree add /tmp/before COMMIT && python bench/two_checkouts.py /tmp/before

Each contestant is a process of `bench/train.py` or `bench/generate.py` of its own checkout, in that checkout's folder. In each
round every one has a turn, timed from here; the first round is not counted. The ratio of a round is (this checkout's speed) /
(the other's). Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path
from statistics import median

from common import RESULTS, ROOT, Worker, write_record

# Name -> program, its words, and the name of its contestant.
WORKLOADS = {
    "train andrea-nano": (
        "train.py",
        "--model andrea-nano --batch 8 --steps 10 --vocabulary 4096 --compile blocks --optimizer muon",
        "andrea, auto, blocks compiled, muon",
    ),
    "train andrea-120m": (
        "train.py",
        "--model andrea-120m --batch 4 --compile blocks --optimizer adamw",
        "andrea, auto, blocks compiled, adamw",
    ),
    "generate andrea-120m, bf16": ("generate.py", "--model andrea-120m", "andrea, bf16"),
    "generate andrea-120m, int8": ("generate.py", "--model andrea-120m", "andrea, int8"),
}


def start(checkout: Path, program: str, words: str, name: str) -> Worker:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return Worker(name, [f"bench/{program}", *words.split()], cwd=checkout, env=environment)


def tokens_per_second(worker: Worker) -> float:
    """Of one run. Timed here, because the processes of older checkouts do not tell their seconds."""
    begin = time.perf_counter()
    return worker.run()["tokens"] / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--output", type=Path, default=RESULTS / "two-checkouts-cpu.json")
    chosen = parser.parse_args()
    checkouts = {"other": chosen.other.resolve(), "this": ROOT}
    rows = {}
    for name in chosen.only:
        contestants = {side: start(folder, *WORKLOADS[name]) for side, folder in checkouts.items()}
        speeds: dict[str, list[float]] = {"other": [], "this": []}
        for number in range(chosen.rounds + 1):
            order = list(contestants) if number % 2 else list(reversed(contestants))
            for side in order:
                speed = tokens_per_second(contestants[side])
                speeds[side] += [speed] if number else []
        for contestant in contestants.values():
            contestant.close()
        ratios = [this / other for this, other in zip(speeds["this"], speeds["other"], strict=True)]
        rows[name] = {
            "ratio": median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "tokens_per_second": speeds,
        }
        print(
            f"{name}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {median(speeds['this']):,.0f} tokens/s"
        )
        commits = {side: commit_of(folder) for side, folder in checkouts.items()}
        write_record(
            chosen.output, "two_checkouts", "cpu", {"commits": commits, "rounds": chosen.rounds, "results": rows}
        )


def commit_of(folder: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
