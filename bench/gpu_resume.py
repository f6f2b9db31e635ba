"""A run that is killed and goes on, beside one that is not: equal to the last bit with deterministic=true, and near without.

    python bench/gpu_resume.py [--device cuda] [WORD=VALUE…]

Of each pair, one run makes its steps in one go; the other gets SIGKILL when it has recorded step 10, and the same command
again. Both runs' losses are compared, step by step, and the bytes of the last weights.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import RESULTS, ROOT, write_record

from andrea.checkpoint import checkpoints_of
from andrea.runtime.files import file_sha256

WORDS = [
    "train.steps=20", "train.log_every=1", "train.eval_every=20", "train.save_every=5", "train.sample_tokens=0",
    "logger=none", "resume=auto",
]  # fmt: skip
KILL_AT = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD=VALUE", help="further settings of every run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu-resume.json")
    chosen = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="andrea-resume-") as scratch:
        for deterministic in ("true", "false"):
            words = [*WORDS, *chosen.words, f"device={chosen.device}", f"deterministic={deterministic}"]
            words += [f"runs_dir={scratch}/{deterministic}", f"data_dir={scratch}/data"]
            row = compared([*words, "name=whole"], [*words, "name=killed"], Path(scratch) / deterministic)
            rows.append({"deterministic": deterministic == "true"} | row)
            print(rows[-1], flush=True)
            write_record(chosen.output, "resume", chosen.device, {"words": WORDS + chosen.words, "rows": rows})
    sys.exit(0 if rows[0]["weights_equal"] and rows[0]["most_difference"] == 0 else 1)


def compared(whole: list[str], killed: list[str], folder: Path) -> dict:
    start = time.monotonic()
    end(whole)
    kill(killed, folder / "killed" / "metrics.jsonl")
    end(killed)
    one, two = losses(folder / "whole"), losses(folder / "killed")
    assert one and one.keys() == two.keys(), (sorted(one), sorted(two))
    weights = [file_sha256(checkpoints_of(folder / name)[-1] / "model.safetensors") for name in ("whole", "killed")]
    return {
        "most_difference": max(abs(one[step] - two[step]) for step in one),
        "last_losses": [one[max(one)], two[max(two)]],
        "weights_equal": weights[0] == weights[1],
        "seconds": round(time.monotonic() - start),
    }


def end(words: list[str]) -> None:
    subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, check=True)


def kill(words: list[str], metrics: Path) -> None:
    """Start the command and kill it at step KILL_AT."""
    process = subprocess.Popen([sys.executable, "train.py", *words], cwd=ROOT)
    while process.poll() is None and max(losses(metrics.parent), default=0) < KILL_AT:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the command ended before it was killed"


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    records = map(json.loads, lines)
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


if __name__ == "__main__":
    main()
