"""What the benches share: the model's shape, interleaved timing, the table and the JSON record."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from andrea.config import ModelConfig, OptimizerConfig, group_config
from andrea.model import GPT, initialise
from andrea.runtime.files import replace_text
from andrea.runtime.free_and_peak_memory import peak_memory_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
RECORDS_FILE = "ANDREA_BENCH_RECORDS"  # environment variable: the file in which bench/gpu.py collects records


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add what both benches take, and read the command line."""
    parser.add_argument(
        "--model", default="andrea-120m", help="a file of configs/model, without .yaml, or a model of variants.yaml"
    )
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
    """The model of configs/model, or that of an earlier recipe in bench/variants.yaml."""
    described = yaml.safe_load((ROOT / "bench" / "variants.yaml").read_text(encoding="utf-8"))
    named, *words = described["models"].get(name, [f"model={name}"])
    changes: dict[str, Any] = dict(
        word.removeprefix("model.").split("=") for word in words if word.startswith("model.")
    )
    if sequence_length is not None:
        changes["sequence_length"] = sequence_length
    return group_config("model", named.removeprefix("model="), **changes)


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


class ContestantLost(Exception):
    """A contestant's process has ended, for example because memory was short."""


class Worker:
    """A contestant in a process of its own: what one settles, and what one holds, is not the others'.

    The process is this very script, or that of `words`, with `--worker NAME` added, and calls `serve`. how: for Popen.
    """

    def __init__(self, name: str, words: Sequence[str] | None = None, **how: Any) -> None:
        command = [sys.executable, *(sys.argv if words is None else words), "--worker", name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent, **how
        )
        self.facts = self.answer()

    def turn(self) -> tuple[int, float]:
        """One run; returns the number of tokens it did, and the seconds that it took."""
        answer = self.run()
        self.facts["peak_memory_bytes"] = answer["peak_memory_bytes"]
        return answer["tokens"], answer["seconds"]

    def run(self) -> dict:
        """One run; returns what the process says of it."""
        assert self.process.stdin is not None
        try:
            print("go", file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the process has ended; `answer` says so
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def answer(self) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            print(line, end="", flush=True)
        raise ContestantLost(f"its process ended with exit code {self.process.wait()}")


def die_with_parent() -> None:
    """In a child process: it gets SIGTERM when its parent ends, also when its parent is killed, in the middle of its work."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def start_workers(names: Iterable[str]) -> dict[str, Worker]:
    """A worker for each name. Those that do not start are named and left out."""
    workers = {}
    for name in names:
        try:
            workers[name] = Worker(name)
        except ContestantLost as lost:
            print(f"LEFT OUT {name}: {lost}", flush=True)
    if not workers:
        raise SystemExit("no contestant has started")
    return workers


def serve(run: Callable[[], int], device: str, warm: Callable[[], object] | None = None, **facts: Any) -> None:
    """Answer a `Worker` until it is gone: facts first, then each run's tokens, its seconds and the most memory held so far.

    On a GPU the memory that a run has freed goes back to the GPU after each turn, so that contestants share it in turns.
    `warm` runs before the clock starts, so that a run does not pay for taking that memory again.
    """
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        if warm is not None:
            warm()
        n_token, seconds = timed(run, device)
        peak = peak_memory_bytes(torch.device(device))
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        print(json.dumps({"tokens": n_token, "seconds": seconds, "peak_memory_bytes": peak}), flush=True)


def timed(run: Callable[[], int], device: str) -> tuple[int, float]:
    """The number of tokens that a run did, and its seconds."""
    synchronise(device)
    start = time.perf_counter()
    n_token = run()
    synchronise(device)
    return n_token, time.perf_counter() - start


class NumberTokenizer:
    """Shows each token as its number, and knows no end: both sides write the same count of tokens."""

    end_of_text, ends = -1, ()

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return " ".join(map(str, tokens)).encode()

    def token_bytes(self) -> list[bytes]:
        return [str(token).encode() for token in range(self.n_vocab)]


def python_path() -> str:
    """PYTHONPATH for a process that imports this checkout: what the caller's own names stays, such as a folder of wheels."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def count_weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def assert_same_size(counts: Iterable[int]) -> None:
    """All within 2 % of each other."""
    counts = list(counts)
    assert max(counts) / min(counts) < 1.02, f"the models differ by more than 2 %: {counts}"


Speeds = dict[str, list[float]]


def interleave(
    runs: dict[str, Callable[[], tuple[int, float]]], pairs: int, after_round: Callable[[Speeds], None]
) -> Speeds:
    """Tokens per second of each run, one after another in each of `pairs` rounds, after one round that does not count.

    A run returns the number of tokens it did, and its seconds. Neighbours in time share what else the machine is doing.
    A contestant whose process ends is named and left out of the rounds that follow. after_round: saves what is known.
    """
    speeds: Speeds = {name: [] for name in runs}
    running = dict(runs)
    for round_index in range(pairs + 1):
        for name, run in list(running.items()):
            try:
                n_token, seconds = run()
            except ContestantLost as lost:
                del running[name]
                print(f"LEFT OUT {name} from round {round_index} on: {lost}", flush=True)
                continue
            if round_index > 0:
                speeds[name].append(n_token / seconds)
            print(f"round {round_index}: {name}: {n_token / seconds:.1f} tokens/s, {seconds:.2f} s", flush=True)
        if round_index > 0:
            after_round(speeds)
        if not running:
            break
    return speeds


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Report:
    """The table and the JSON of one measurement. `save` is called after each round, `show` at the end.

    A ratio is the median over rounds of (this / baseline) in the same round; None where the baseline was left out.
    facts: what else is known, as the keys of the record; asked for anew at each save.
    """

    def __init__(
        self, bench: str, chosen: argparse.Namespace, baseline: str, facts: Callable[[], dict] = lambda: {}
    ) -> None:
        self.bench, self.chosen, self.baseline, self.facts = bench, chosen, baseline, facts
        kind = chosen.device.partition(":")[0]
        now = datetime.datetime.now(datetime.UTC)
        self.path = chosen.output or RESULTS / f"{bench}-{chosen.model}-{kind}-{now:%Y%m%d-%H%M%S}.json"

    def save(self, speeds: Speeds) -> None:
        settings = {key: value for key, value in vars(self.chosen).items() if key not in ("output", "worker")}
        content = {"settings": settings, "baseline": self.baseline, **self.facts()}
        write_record(self.path, self.bench, self.chosen.device, {**content, "results": rows_of(speeds, self.baseline)})

    def show(self, speeds: Speeds) -> None:
        self.save(speeds)
        facts = self.facts().get("contestants", {})
        memory = {name: about["peak_memory_bytes"] for name, about in facts.items() if "peak_memory_bytes" in about}
        print(f"\n{'':42}{'tokens/s':>12}{'ratio':>8}{'lowest':>8}{'highest':>9}{'peak memory' if memory else '':>14}")
        for name, row in rows_of(speeds, self.baseline).items():
            peak = f"{memory[name] / 2**30:10.2f} GiB" if name in memory else ""
            print(f"{table_line(name, row)}{peak}")
        print(f"\nwritten: {self.path}")


def rows_of(speeds: Speeds, baseline: str) -> dict[str, dict]:
    """The median speed of each contestant that ended a round, and its ratio to the baseline."""
    rows = {}
    for name, each in speeds.items():
        if not each:
            continue
        ratios = [mine / base for mine, base in zip(each, speeds.get(baseline, []), strict=False)]
        rows[name] = {
            "tokens_per_second": statistics.median(each),
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_lowest": min(ratios, default=None),
            "ratio_highest": max(ratios, default=None),
            "rounds": list(each),
        }
    return rows


def table_line(name: str, row: dict) -> str:
    ratios = [row[key] for key in ("ratio", "ratio_lowest", "ratio_highest")]
    shown = ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return f"{name:42}{row['tokens_per_second']:12.1f}{shown[0]:>8}{shown[1]:>8}{shown[2]:>9}"


def write_record(path: Path, bench: str, device: str, content: dict) -> None:
    """The JSON of one measurement: what was measured, when, on what. A process that is killed leaves a whole file.

    bench/gpu.py collects the records of all its parts in one file, which RECORDS_FILE names. They are written there at
    once, and not by bench/gpu.py later, so that nothing is lost where both are killed.
    """
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = json.loads(json.dumps({"bench": bench, "date": date, "machine": machine(device), **content}, default=str))
    replace_text(path, json.dumps(record, indent=1) + "\n")
    if os.environ.get(RECORDS_FILE):
        add_record(Path(os.environ[RECORDS_FILE]), path.stem, record)


def add_record(collected: Path, name: str, record: dict) -> None:
    """Put a record into the file of all records; one process at a time does so."""
    known = json.loads(collected.read_text(encoding="utf-8")) if collected.exists() else {}
    replace_text(collected, json.dumps(known | {name: record}, indent=1) + "\n")


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
