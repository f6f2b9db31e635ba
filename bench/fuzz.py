"""A hundred thousand hostile inputs at the borders of tests/fuzzing/, each border in a process of its own.

    python bench/fuzz.py --inputs 100000

An input must be taken or refused with a UserError, within 5 s of the processor and 2 GB; whatever else happens is a
finding. Exit code 1 if there is one. Seconds in the table are of the clock, but for the slowest input's.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, version_of, write_record

sys.path.insert(0, str(ROOT / "tests"))

# What part of the inputs goes to each: what is cheap and has many ways in gets more.
SHARES = {
    "configuration": 0.2,
    "token shards": 0.2,
    "checkpoints": 0.2,
    "resumes": 0.147,
    "records": 0.05,
    "commands": 0.003,
    "tokenizer files": 0.1,
    "prompts": 0.08,
    "imports": 0.02,
}
PACKAGES = ("hypothesis", "safetensors", "PyYAML", "hydra-core", "tiktoken", "tokenizers", "transformers", "numpy")


def attack(name: str, inputs: int, seed: int) -> dict:
    """The outcome at one border, in this process, whose peak memory is then this border's."""
    import torch
    from fuzzing import TARGETS
    from fuzzing.trial import fuzz, peak_megabytes

    torch.set_num_threads(1)
    before = peak_megabytes()
    with tempfile.TemporaryDirectory() as place:
        outcome = fuzz(TARGETS[name], Path(place), inputs, seed)
    return {"target": name, "seed": seed, "memory_before_mb": round(before), **dataclasses.asdict(outcome)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--targets", nargs="*", default=list(SHARES), choices=list(SHARES), help="these alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "fuzz.json")
    chosen = parser.parse_args()
    whole = sum(SHARES[name] for name in chosen.targets)
    rows, started = [], time.monotonic()
    print(
        f"{'target':18}{'inputs':>8}{'refused':>9}{'seconds':>9}{'slowest s':>11}{'peak MB':>9}{'findings':>10}",
        flush=True,
    )
    for name in chosen.targets:
        inputs = round(chosen.inputs * SHARES[name] / whole)
        with multiprocessing.get_context("spawn").Pool(1) as process:
            row = process.apply(attack, (name, inputs, chosen.seed))
        rows.append(row)
        numbers = f"{row['seconds']:9.0f}{row['slowest_s']:11.2f}{row['peak_memory_mb']:9.0f}"
        print(f"{name:18}{row['inputs']:8}{row['refused']:9}{numbers}{len(row['findings']):10}", flush=True)
        for place, tried in row["findings"].items():
            print(f"  {place}\n    {ascii(tried)}", flush=True)
    found = sum(len(row["findings"]) for row in rows)
    total = {
        "inputs": sum(row["inputs"] for row in rows),
        "seconds": round(time.monotonic() - started),
        "findings": found,
    }
    print(total)
    versions = {package: version_of(package) for package in PACKAGES}
    write_record(chosen.output, "fuzz", "cpu", {"versions": versions, **total, "rows": rows})
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
