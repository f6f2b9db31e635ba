"""How near the default run on a small text comes to a run whose keys were tuned for that text.

    python bench/small_texts.py tinyshakespeare.txt lodash.js

For each text: `python train.py data=text data.path=TEXT` with no other key that changes what is learned; then the keys of TRIED
one after the other, each multiplied by its factors until one lowers the result's bits per byte, on the same seed. That value
is kept for the keys that follow. The result of a run is its best evaluation, as train.py names it at the end. Finished runs are
kept in the record, and a study that was cut off goes on after them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, ROOT, write_record

from andrea.insight.compare.runs import result_of
from andrea.runtime.files import exclusive_lock
from andrea.training.records.run_folder import read_lines

QUIET = ["logger=none", "train.sample_tokens=0", "name=run"]
TRIED = {  # factors of each key: dropout's are values, because the default is 0
    "optimizer.weight_decay": (2.0, 0.5),
    "train.steps": (1.4, 0.7),
    "tokenizer.vocab_size": (0.6, 1.6),
    "model.dropout": (0.1,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--only-default", action="store_true", help="train the default, and tune nothing")
    parser.add_argument("--words", nargs="*", default=[], help="key=value for every run, such as threads=1")
    parser.add_argument(
        "--keys", nargs="*", default=[], help="key=value that changes what is learned, recorded as tuned"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "small-texts-cpu.json")
    chosen = parser.parse_args()
    for path in chosen.texts:
        best: dict[str, Any] = dict(word.split("=", 1) for word in chosen.keys)  # the tuned keys
        result = default = run_once(chosen, path, best)
        for key, factors in {} if chosen.only_default else TRIED.items():
            for factor in factors:
                candidate = best | {key: scaled(key, factor, result["config"])}
                run = run_once(chosen, path, candidate)
                if run["bits_per_byte"] < result["bits_per_byte"]:
                    best, result = candidate, run
                    break
        print(
            f"{path.name}: default {default['bits_per_byte']:.4f} ({default['steps']} steps, {default['epochs']:.1f} epochs, "
            f"result of step {default['result_step']}); tuned {result['bits_per_byte']:.4f} ({words_of(best) or 'no key'})",
            flush=True,
        )


def scaled(key: str, factor: float, config: dict[str, Any]) -> float | int:
    """A key's value in the best run so far, times the factor."""
    group, name = key.split(".")
    if key == "model.dropout":
        return factor
    value = config[group][name] * factor
    if key == "tokenizer.vocab_size":
        return 64 * round(value / 64)
    return round(value) if key == "train.steps" else round(value, 2)


def words_of(tuned: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in tuned.items())


def run_once(chosen: argparse.Namespace, path: Path, tuned: dict[str, Any]) -> dict[str, Any]:
    """The recorded run of a text, or a new one."""
    key = words_of({"seed": chosen.seed} | tuned)
    run = recorded(chosen.output).get(path.name, {"runs": {}})["runs"].get(key)
    if run is None:
        run = train(path, [*chosen.words, *key.split()])
        with exclusive_lock(chosen.output.with_suffix(".lock"), on_wait=lambda: None):
            texts = recorded(chosen.output)
            texts.setdefault(path.name, {"bytes": path.stat().st_size, "runs": {}})["runs"][key] = run
            write_record(chosen.output, "small_texts", "cpu", {"texts": texts})
    print(f"{path.name} {key}: {run['bits_per_byte']:.4f}", flush=True)
    return run


def recorded(output: Path) -> dict[str, Any]:
    return json.loads(output.read_text(encoding="utf-8"))["texts"] if output.exists() else {}


def train(path: Path, words: list[str]) -> dict[str, Any]:
    """Train on the text. Returns length, chosen keys, and bits per byte of the result and of each evaluation."""
    with tempfile.TemporaryDirectory(prefix="andrea-small-texts-") as place:
        places = [f"runs_dir={place}/runs", f"data_dir={place}/data", "data=text", f"data.path={path.resolve()}"]
        subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *places, *QUIET, *words], check=True, stdout=subprocess.DEVNULL
        )
        run = Path(place) / "runs" / "run"
        records = read_lines(run / "metrics.jsonl")
        evaluations = [record for record in records if "val/loss" in record and "event" not in record]
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        result, last = result_of(evaluations, run), max(evaluations, key=lambda record: record["step"])
    return {
        "steps": last["step"],
        "epochs": next(record["train/epoch"] for record in reversed(records) if "train/epoch" in record),
        "seconds": last["seconds"],
        "result_step": result["step"],
        "bits_per_byte": result["val/bpb"],
        "judged_bits_per_byte": result.get("val/judged_bpb"),
        "curve": {str(each["step"]): each["val/bpb"] for each in evaluations},
        "config": {
            "train": {"steps": last["step"]},
            "optimizer": {"weight_decay": config["optimizer"]["weight_decay"]},
            "tokenizer": {"vocab_size": config["tokenizer"]["vocab_size"]},
        },
    }


if __name__ == "__main__":
    main()
