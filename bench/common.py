"""What the benches share: the model's shape, interleaved timing, the table and the JSON record."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from andrea.config import ModelConfig, OptimizerConfig, group_config
from andrea.model import GPT, initialise
from andrea.runtime.device import peak_memory_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add what both benches take, and read the command line."""
    parser.add_argument("--model", default="andrea-120m", help="a file of configs/model, without .yaml")
    parser.add_argument("--vocabulary", type=int, default=50257, help="tokens in the vocabulary")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads, on both sides")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved rounds; the median is reported")
    parser.add_argument("--output", type=Path, help="JSON file; default bench/results/NAME-MODEL-DEVICE-DATE.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    return chosen


def model_config(name: str, sequence_length: int | None = None) -> ModelConfig:
    return group_config("model", name, **({} if sequence_length is None else {"sequence_length": sequence_length}))


def optimizer_config(kind: str) -> OptimizerConfig:
    return group_config("optimizer", kind)


def make_andrea(config: ModelConfig, n_vocab: int, device: str, implementation: str = "auto") -> GPT:
    model = GPT(config, group_config("attention", "scaled_dot", implementation=implementation), n_vocab)
    initialise(model, torch.Generator().manual_seed(0))
    return model.to(device)


def make_hugging_face(config: ModelConfig, n_vocab: int, device: str) -> torch.nn.Module:
    """GPT2LMHeadModel of the same widths, depth and head; no dropout, as this project has none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=n_vocab,
            n_positions=config.sequence_length,
            n_embd=config.d_model,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_inner=config.d_mlp,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=config.tied_head,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).to(device)


class Worker:
    """A contestant in a process of its own: what one settles, and what one holds, is not the others'.

    The process is this very script with `--worker NAME` added, and calls `serve`.
    """

    def __init__(self, name: str) -> None:
        command = [sys.executable, *sys.argv, "--worker", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self.answer()

    def turn(self) -> int:
        """One run; returns the number of tokens it did."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        answer = self.answer()
        self.facts["peak_memory_bytes"] = answer["peak_memory_bytes"]
        return answer["tokens"]

    def answer(self) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            print(line, end="", flush=True)
        raise SystemExit(f"a contestant's process ended with exit code {self.process.wait()}")


def serve(run: Callable[[], int], device: str, **facts: Any) -> None:
    """Answer a `Worker` until it is gone: facts first, then each run's tokens and the most memory held so far."""
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        n_token = run()
        synchronise(device)
        print(json.dumps({"tokens": n_token, "peak_memory_bytes": peak_memory_bytes(torch.device(device))}), flush=True)


class NumberTokenizer:
    """Shows each token as its number, and knows no end: both sides write the same count of tokens."""

    end_of_text = -1

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return " ".join(map(str, tokens)).encode()


def count_weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def assert_same_size(counts: Iterable[int]) -> None:
    """All within 2 % of each other."""
    counts = list(counts)
    assert max(counts) / min(counts) < 1.02, f"the models differ by more than 2 %: {counts}"


def interleave(runs: dict[str, Callable[[], int]], pairs: int, device: str) -> dict[str, list[float]]:
    """Tokens per second of each run, one after another in each of `pairs` rounds, after one round that does not count.

    A run returns the number of tokens it did. Neighbours in time share what else the machine is doing.
    """
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(pairs + 1):
        for name, run in runs.items():
            synchronise(device)
            start = time.perf_counter()
            n_token = run()
            synchronise(device)
            seconds = time.perf_counter() - start
            if round_index > 0:
                speeds[name].append(n_token / seconds)
            print(f"round {round_index}: {name}: {n_token / seconds:.1f} tokens/s, {seconds:.2f} s", flush=True)
    return speeds


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def report(bench: str, chosen: argparse.Namespace, speeds: dict[str, list[float]], baseline: str, facts: dict) -> None:
    """Print the table and write the JSON. A ratio is the median over rounds of (this / baseline) in the same round."""
    rows = {}
    for name, each in speeds.items():
        ratios = [mine / base for mine, base in zip(each, speeds[baseline], strict=True)]
        rows[name] = {
            "tokens_per_second": statistics.median(each),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "rounds": each,
        }
    memory = {name: about["peak_memory_bytes"] for name, about in facts.get("contestants", {}).items()}
    print(f"\n{'':42}{'tokens/s':>12}{'ratio':>8}{'lowest':>8}{'highest':>9}{'peak memory' if memory else '':>14}")
    for name, row in rows.items():
        numbers = (row["tokens_per_second"], row["ratio"], row["ratio_lowest"], row["ratio_highest"])
        peak = f"{memory[name] / 2**30:10.2f} GiB" if name in memory else ""
        print(f"{name:42}{numbers[0]:12.1f}{numbers[1]:8.2f}{numbers[2]:8.2f}{numbers[3]:9.2f}{peak}")
    settings = {key: value for key, value in vars(chosen).items() if key not in ("output", "worker")}
    now = datetime.datetime.now(datetime.UTC)
    kind = chosen.device.partition(":")[0]
    path = chosen.output or RESULTS / f"{bench}-{chosen.model}-{kind}-{now:%Y%m%d-%H%M%S}.json"
    write_record(path, bench, chosen.device, {"settings": settings, "baseline": baseline, **facts, "results": rows})


def write_record(path: Path, bench: str, device: str, content: dict) -> None:
    """The JSON of one measurement: what was measured, when, on what."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"bench": bench, "date": date, "machine": machine(device), **content}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(device: str) -> dict:
    processor = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [line.partition(":")[2].strip() for line in cpu_info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "bf16": torch.cpu._is_avx512_bf16_supported(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
    }
