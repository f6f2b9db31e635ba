"""How near the default run on a small text comes to the best of a sweep over train.steps.

    python bench/small_texts.py 20kB.txt 200kB.txt 2MB.txt

For each text: `python train.py data=text data.path=TEXT` with no other key that changes what is learned, and runs of typed
lengths around the length that the default plans, on the same seed. Of the default run, the validation loss of its result
counts; of a run of the sweep, that of its last step. `curve` holds the validation loss at each evaluation. Finished runs are
kept in the record; a study that was cut off goes on after them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, ROOT, write_record

from andrea.insight.compare.runs import result_of
from andrea.training.records.run_folder import read_lines

QUIET = ["logger=none", "train.sample_tokens=0", "train.lens_prompt=", "name=run"]
FACTORS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # of the planned length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--factors", nargs="*", type=float, default=FACTORS)
    parser.add_argument("--words", nargs="*", default=[], help="key=value for every run, such as threads=1")
    parser.add_argument("--output", type=Path, default=RESULTS / "small-texts-cpu.json")
    chosen = parser.parse_args()
    texts: dict[str, Any] = {}
    if chosen.output.exists():
        texts = json.loads(chosen.output.read_text(encoding="utf-8"))["texts"]
    for path in chosen.texts:
        row = texts.setdefault(path.name, {"bytes": path.stat().st_size, "default": None, "sweep": {}})
        row["default"] = row["default"] or run_of(path, chosen.words)
        write_record(chosen.output, "small_texts", "cpu", {"texts": texts})
        for factor in chosen.factors:
            steps = str(max(1, round(factor * row["default"]["steps"])))
            if steps not in row["sweep"]:
                row["sweep"][steps] = run_of(path, [*chosen.words, f"train.steps={steps}", "train.eval_every=100000"])
            write_record(chosen.output, "small_texts", "cpu", {"texts": texts})
        if row["sweep"]:
            print(table_row(path.name, row), flush=True)


def run_of(path: Path, words: list[str]) -> dict[str, Any]:
    """Train on the text. Returns the planned length, the result's step and validation loss, and the loss at each evaluation."""
    place = Path(tempfile.gettempdir()) / "andrea-small-texts"
    shutil.rmtree(place / "runs", ignore_errors=True)
    places = [f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}", "data=text", f"data.path={path.resolve()}"]
    command = [sys.executable, str(ROOT / "train.py"), *places, *QUIET, *words]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    run = place / "runs" / "run"
    records = [record for record in read_lines(run / "metrics.jsonl") if "event" not in record]
    evaluations = [record for record in records if "val/loss" in record]
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    result = result_of(evaluations, config)
    return {
        "steps": evaluations[-1]["step"],
        "epochs": evaluations[-1]["train/epoch"],
        "result_step": result["step"],
        "val_loss": result["val/loss"],
        "val_bpb": result["val/bpb"],
        "judged_bpb": result.get("val/judged_bpb"),
        "curve": {str(each["step"]): each["val/loss"] for each in evaluations},
        "said": [
            line
            for line in said.splitlines()
            if line.startswith(("small text", "the validation loss has", "judged", "result:", "done"))
        ],
    }


def table_row(name: str, row: dict[str, Any]) -> str:
    default, sweep = row["default"], {int(steps): run["val_loss"] for steps, run in row["sweep"].items()}
    best = min(sweep, key=lambda steps: sweep[steps])
    return (
        f"{name}: default {default['steps']} steps, {default['epochs']:.1f} epochs, result of step {default['result_step']}: "
        f"{default['val_loss']:.4f}; best of the sweep: {best} steps, {sweep[best]:.4f}; "
        f"ratio {default['val_loss'] / sweep[best]:.4f}"
    )


if __name__ == "__main__":
    main()
