"""What each ingredient of the default recipe is worth: one changed at a time, at equal tokens, on the default data.

    python bench/ablation.py --steps 300 --seeds 1337

Each row is a whole `train.py` run with one thing changed; the figure is validation bits per byte at its end, over the
whole held-out split, beside the run's FLOPs as a multiple of the default's. Rates are those of the default recipe but
for AdamW, whose own were tried in a small sweep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, write_record

ADAMW = ["optimizer=adamw", "optimizer.schedule=constant_then_decay", "optimizer.decay_fraction=0.6"]
ADAMW += ["optimizer.warmup_steps=10", "optimizer.final_fraction=0"]
VARIANTS = {
    "default": [],
    "AdamW, rate 0.0015": [*ADAMW, "optimizer.learning_rate=0.0015"],
    "AdamW, rate 0.003": [*ADAMW, "optimizer.learning_rate=0.003"],
    "learned positions": ["model.position=learned"],
    "no positions": ["model.position=none"],
    "squared ReLU, equal parameters": ["model.mlp=relu2", "model.d_mlp=768"],
    "GELU, equal parameters": ["model.mlp=gelu", "model.d_mlp=768"],
    "LayerNorm": ["model.norm=layernorm"],
    "without QK-norm": ["model.qk_norm=false"],
    "without softcap": ["model.logit_softcap=null"],
    "tied head": ["model.tied_head=true"],
    "zero-initialised projections": ["model.zero_init_projections=true"],
    "cosine schedule": ["optimizer.schedule=cosine"],
    "without weight decay": ["optimizer.weight_decay=0"],
    "warm-up of 50 steps": ["optimizer.warmup_steps=50"],
    "head rate halved": ["optimizer.learning_rate=0.005"],
    "head rate doubled": ["optimizer.learning_rate=0.02"],
    "T = 128": ["model.sequence_length=128"],
}
QUIET = ["logger=none", "compile=on", "train.sample_tokens=0", "train.eval_every=1000000", "train.save_every=1000000"]


def last_record(words: list[str], steps: int, seed: int, runs_dir: str, data_dir: str) -> dict:
    """Train one variant and read the last line of its metrics."""
    command = [sys.executable, str(ROOT / "train.py"), f"train.steps={steps}", f"seed={seed}", *words, *QUIET]
    name = f"run{len(list(Path(runs_dir).glob('*')))}"
    places = [f"runs_dir={runs_dir}", f"data_dir={data_dir}", f"name={name}"]
    subprocess.run([*command, *places], check=True, stdout=subprocess.DEVNULL)
    last = (Path(runs_dir) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return json.loads(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="rows to run")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "ablation-andrea-nano.json")
    chosen = parser.parse_args()
    rows: list[dict] = []
    print(f"{'':40}{'bits/byte':>10}{'change':>9}{'FLOPs':>8}")
    with tempfile.TemporaryDirectory() as place:
        for name in chosen.only:
            words = VARIANTS[name]
            records = [last_record(words, chosen.steps, s, place + "/runs", place + "/data") for s in chosen.seeds]
            figures, flops = [record["val/bpb"] for record in records], records[0]["flops"]
            row = {"variant": name, "changes": words, "bpb": figures, "mean_bpb": statistics.mean(figures)}
            rows.append(row | {"flops": flops})
            change, more = row["mean_bpb"] - rows[0]["mean_bpb"], flops / rows[0]["flops"]
            print(f"{name:<40}{row['mean_bpb']:10.4f}{change:+9.4f}{more:8.2f}", flush=True)
    write_record(chosen.output, "ablation", "cpu", {"steps": chosen.steps, "seeds": chosen.seeds, "rows": rows})


if __name__ == "__main__":
    main()
