"""Peak memory: what `dry_run=true` plans beside what a short run really takes, for sizes, micro-batches and precisions.

    python bench/memory.py                             # all cases, one after another; --models andrea-nano: those alone
    python bench/memory.py --device cuda

Each case is a run of train.py in a process of its own, two steps long. On a CPU its peak is the largest resident set of
that process, on a card the most that tensors held (torch.cuda.max_memory_allocated). A second call measures what the
first one did not, and plans all of it anew. andrea-120m reads GPT-2's own tokenizer (TIKTOKEN_CACHE_DIR, or a network).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import RESULTS, ROOT, write_record

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.training.planning.length import planned_vocabulary
from andrea.training.planning.memory import GIB, Placement, memory_of
from andrea.training.records.run_folder import read_lines

TOKENIZERS = {"andrea-nano": "bpe", "andrea-12m": "byte", "andrea-120m": "gpt2", "andrea-480m": "byte"}
MICRO_BATCHES = (1, 2, 4)
NUMBERS = (
    ("fp32", "off"),
    ("fp32", "on"),
    ("bf16", "off"),
    ("bf16", "on"),
    ("bf16", "blocks"),
)  # (precision, torch.compile)
TEXT = Path(argparse.__file__).with_name("_pydecimal.py")  # on every machine, and short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TOKENIZERS), help="files of configs/model, without .yaml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    chosen = parser.parse_args()
    path = chosen.output
    rows = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    for model, (precision, compile_), recompute, micro_batch in itertools.product(
        chosen.models, NUMBERS, (False, True), chosen.micro_batches
    ):
        if precision not in chosen.precisions:
            continue
        parts = [chosen.device, model, precision, {"off": "eager", "on": "compiled", "blocks": "blocks"}[compile_]]
        name = " ".join([*parts, *(["checkpointing"] if recompute else []), f"{micro_batch} at a time"])
        if name not in rows:
            words = words_of(model, precision, compile_, recompute, micro_batch, chosen.device)
            rows[name] = {"words": words, "measured": measure(words)}
            write_record(path, "memory", chosen.device, {"results": rows})
    for row in rows.values():
        row |= planned(row["words"])
        row["ratio"] = row["plan"]["total"] / row["measured"]
    show(rows)
    write_record(path, "memory", chosen.device, {"results": rows})


def words_of(model: str, precision: str, compile_: str, recompute: bool, micro_batch: int, device: str) -> list[str]:
    """A run whose steps are two micro-batches, so that gradients are there when the second one begins."""
    run = configure(RunConfig, "train", [f"model={model}"])
    return [
        f"model={model}", f"tokenizer={TOKENIZERS[model]}", f"device={device}",
        f"precision={precision}", f"compile={compile_}", f"train.activation_checkpointing={str(recompute).lower()}",
        f"train.micro_batch={micro_batch}", f"train.tokens_per_step={2 * micro_batch * run.model.sequence_length}",
        "train.steps=2", "train.eval_every=2", "train.sample_tokens=0", "logger=none",
    ]  # fmt: skip


def measure(words: list[str]) -> int:
    """The peak of a run, in bytes: what it wrote of itself at its end."""
    of_text = ["data=text", f"data.path={TEXT}", f"data_dir={Path(tempfile.gettempdir()) / 'andrea-bench-memory'}"]
    prepare(*(word for word in words if word.startswith("tokenizer")), *of_text)
    with tempfile.TemporaryDirectory() as folder:
        where = [f"runs_dir={folder}", "name=run", *of_text]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *words, *where], cwd=ROOT, check=True)
        records = read_lines(Path(folder) / "run" / "metrics.jsonl")
    return records[-1]["train/peak_memory_bytes"]


@functools.cache
def prepare(*words: str) -> None:
    """Text is prepared in a process of its own, whose memory is not counted."""
    subprocess.run([sys.executable, "-m", "andrea", "prepare", *words], cwd=ROOT, check=True)


def planned(words: list[str]) -> dict:
    run = configure(RunConfig, "train", words)
    micro_batch = run.train.micro_batch
    assert isinstance(micro_batch, int)
    memory = memory_of(run, planned_vocabulary(run), micro_batch, Placement(torch.device(run.device), run.precision))
    return {"plan": dataclasses.asdict(memory) | {"total": memory.total}}


def show(rows: dict[str, dict]) -> None:
    print(f"\n{'':56}{'plan':>10}{'measured':>10}{'ratio':>8}")
    for name, row in rows.items():
        print(f"{name:56}{row['plan']['total'] / GIB:10.2f}{row['measured'] / GIB:10.2f}{row['ratio']:8.2f}")
    ratios = [row["ratio"] for row in rows.values()]
    print(f"GiB; the plan is {min(ratios):.2f} to {max(ratios):.2f} times what was measured")


if __name__ == "__main__":
    main()
