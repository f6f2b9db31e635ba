"""Makes the runs of tests/data/golden anew: `python tests/golden_runs.py`. To be run only when the format has changed on purpose.

`tests/data/golden/` holds

    text/                what the runs are trained on; the prepared folder's name depends on its times: made.json has them
    data/                the prepared folders, without verified.json, which belongs to one machine
    saved/NAME/          run folders with their middle checkpoint; `muon` has its last one too, `sharded` is of two ranks
    expected/NAME.safetensors    weights at the end; of `sharded` those that one process gets from the middle checkpoint
    made.json            the figures of the end, the sampled texts

On 1 December 2026 the figures of heads and `health/epochs` after the middle checkpoints were measured anew: before, the probe of
a short held-out text had free rows, and an epoch was all tokens of the text instead of all its targets. The rest is as it was made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "golden"
TEXT_TIME_NS = 1_700_000_000_000_000_000
TINY = """data=text data.path=text runs_dir=runs data_dir=data logger=none device=cpu compile=off threads=1 precision=fp32
    model.d_model=8 model.n_layer=2 model.n_head=2 model.d_mlp=16 model.sequence_length=32 optimizer.warmup_steps=2
    train.keep=10"""
SHORT = """train.steps=8 train.tokens_per_step=128 train.log_every=1 train.eval_every=2 train.save_every=4
    train.sample_tokens=8"""
RATES = "optimizer.learning_rate=0.005 optimizer.embedding_learning_rate=0.01"
RUNS = {
    "muon": f"tokenizer=byte optimizer=muon model.bigram_rows=64 {RATES} {SHORT}",
    "adamw": f"""model=gpt2 tokenizer=bpe tokenizer.vocab_size=300 optimizer=adamw optimizer.learning_rate=0.01
        optimizer.epsilon=1e-4 optimizer.tuned_d_model=null optimizer.tuned_n_layer=null {SHORT}""",
    "bilinear": f"tokenizer=byte attention=bilinear model.bigram_rows=64 {RATES} {SHORT}",
    "sharded": f"model=andrea-12m tokenizer=byte parallel=fsdp {RATES} {SHORT}",
    "health": f"""tokenizer=byte {RATES} train.steps=60 train.tokens_per_step=2048 train.eval_every=20 train.save_every=30
        train.log_every=10 train.sample_tokens=48 optimizer.clip_norm=0.01""",
}
SAMPLE = "temperature=0.8 max_new_tokens=40 seed=1337 device=cpu threads=1 precision=fp32"
SAMPLE_WORDS = ["prompt=the", *SAMPLE.split()]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(DATA / "text", place / "text")
        for file in (place / "text").iterdir():
            os.utime(file, ns=(TEXT_TIME_NS, TEXT_TIME_NS))
        made = {name: make(name, place) for name in RUNS}
        for name in ("data", "saved", "expected"):
            shutil.rmtree(DATA / name, ignore_errors=True)
        left_out = shutil.ignore_patterns("verified.json", "*lock*", "*.html", "lens", "run.log")
        shutil.copytree(place / "data", DATA / "data", ignore=left_out)
        shutil.copytree(place / "runs", DATA / "saved", ignore=left_out)
        (DATA / "expected").mkdir()
        for name, about in made.items():
            checkpoints = DATA / "saved" / name / "checkpoints"
            last = next(checkpoints.glob(f"step-*{about['steps']}"))
            if name != "muon":
                shutil.copy(place / name / "model.safetensors", DATA / "expected" / f"{name}.safetensors")
                shutil.rmtree(last)
            for path in checkpoints.glob("step-*"):
                if path.name not in (last.name, f"step-{about['middle']:08d}"):
                    shutil.rmtree(path)
        about = {"torch": torch.__version__, "text_mtime_ns": TEXT_TIME_NS, "sample_words": SAMPLE_WORDS, "runs": made}
        (DATA / "made.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def make(name: str, place: Path) -> dict[str, Any]:
    """Train the run, and return the facts about it. A copy of its last checkpoint is put in the folder `name`."""
    ranks, steps = (2, 8) if name == "sharded" else (1, 60 if name == "health" else 8)
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [f"name={name}", *TINY.split(), *RUNS[name].split()]
    call(place, *(many if ranks > 1 else []), str(ROOT / "train.py"), *words)
    made = {"ranks": ranks, "steps": steps, "middle": steps // 2} | end_of(name, steps, place)
    run = place / "runs" / name
    if ranks > 1:  # what one process gets from the middle checkpoint
        shutil.copytree(run, place / "kept")
        call(place, str(ROOT / "train.py"), f"resume={checkpoint(run, steps // 2)}", f"name={name}")
        made["alone"] = end_of(name, steps, place)
        shutil.copytree(checkpoint(run, steps), place / name)
        shutil.rmtree(run)
        (place / "kept").rename(run)
    else:
        shutil.copytree(checkpoint(run, steps), place / name)
    sample = call(place, str(ROOT / "sample.py"), f"checkpoint={checkpoint(run, steps // 2)}")
    return made | {"sample_of_middle": sample}


def end_of(name: str, steps: int, place: Path) -> dict[str, Any]:
    run = place / "runs" / name
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    figures = [record for record in map(json.loads, lines) if "val/bpb" in record][-1]
    sample = call(place, str(ROOT / "sample.py"), f"checkpoint={checkpoint(run, steps)}")
    return {"end": {key: figures[key] for key in ("step", "val/loss", "val/bpb")}, "sample_of_last": sample}


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def call(place: Path, *words: str) -> str:
    """Run a script in the folder `place`; returns its standard output. sample.py gets SAMPLE_WORDS."""
    more = SAMPLE_WORDS if words[0].endswith("sample.py") else []
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *words, *more], cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
