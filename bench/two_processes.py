"""A process that computes on all cores, beside others: what share of its speed alone is left?

    python bench/two_processes.py                    # with and without the watch, at 40,000 spins
    python bench/two_processes.py --settings 1000 40000 40000+watch --rounds 5

A waiting thread first spins, which keeps its core from others, and then sleeps. A setting is the number of spins
(GOMP_SPINCOUNT); `+watch`: threads spin less while other programs compute (andrea/runtime/shared_cores.py). There are two
workers for each setting; in a round each measures the first alone, beside one and two programs that only count, beside
the second, and the first training while the second generates. Shown are medians over rounds of the speed over that of the
first setting alone, in the same round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import RESULTS, NumberTokenizer, make_andrea, model_config, write_record

from andrea.generation import Engine, Request, Sampling
from andrea.runtime.device import choose_precision, keep_freed_memory
from andrea.runtime.shared_cores import PERIOD_S, QUIET_PERIODS, SPINS, VARIABLES, sharing_cores
from train import andrea_steps

COUNT = "while True: pass"
# What works at the same time: programs that only count, and what each worker does.
CASES = {
    "run": (0, ["run"]),
    "run, one busy program": (1, ["run"]),
    "run, two busy programs": (2, ["run"]),
    "two runs": (0, ["run", "run"]),
    "sample": (0, ["sample"]),
    "sample, one busy program": (1, ["sample"]),
    "run and sample": (0, ["run", "sample"]),
}


class Worker:
    """A process with the environment of one setting that works for some seconds when asked to."""

    def __init__(self, setting: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment["GOMP_SPINCOUNT"] = setting.removesuffix("+watch")
        self.process = subprocess.Popen(
            [sys.executable, *sys.argv, "--worker", setting],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, kind: str, seconds: float) -> None:
        assert self.process.stdin is not None
        print(json.dumps([kind, seconds]), file=self.process.stdin, flush=True)

    def answer(self) -> float:
        """Tokens per second."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[f"{SPINS}", f"{SPINS}+watch"], help="GOMP_SPINCOUNT[+watch]")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=3.0, help="that are measured")
    parser.add_argument("--compile", choices=("on", "blocks", "off"), default="off")
    parser.add_argument("--sequences", type=int, default=8, help="in a micro-batch of a run")
    parser.add_argument("--model", default="andrea-nano", help="a file of configs/model, without .yaml")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens in the vocabulary")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "two-processes-cpu.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen)
        return
    workers = {setting: [Worker(setting), Worker(setting)] for setting in chosen.settings}
    for worker in sum(workers.values(), []):  # compile, and load what is compiled
        for kind in sorted({kind for name in chosen.cases for kind in CASES[name][1]}):
            worker.ask(kind, 0.1)
            worker.answer()
    settings = {key: value for key, value in vars(chosen).items() if key not in ("output", "worker")}
    rounds: list[dict] = []
    for number in range(chosen.rounds):
        rounds.append({name: {} for name in CASES if name in chosen.cases})
        for name, figures in rounds[-1].items():
            for setting in chosen.settings[:: 1 if number % 2 == 0 else -1]:
                figures[setting] = measured(workers[setting], *CASES[name], chosen.seconds)
        rows = summary(rounds, chosen.settings[0])
        show(rows, f"\nround {number + 1} of {chosen.rounds}", chosen.settings)
        write_record(chosen.output, "two-processes", "cpu", {"settings": settings, "results": rows, "rounds": rounds})


def measured(pair: list[Worker], n_busy: int, kinds: list[str], seconds: float) -> list[float]:
    """The tokens per second of each worker that takes part."""
    busy = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(n_busy)]
    try:
        for worker, kind in zip(pair, kinds, strict=False):
            worker.ask(kind, seconds)
        return [worker.answer() for worker, _ in zip(pair, kinds, strict=False)]
    finally:
        for each in busy:
            each.kill()
            each.wait()


def summary(rounds: list[dict], first: str) -> dict[str, dict[str, list[float]]]:
    """Ratios [median, lowest, highest] by name of row and setting."""
    rows: dict[str, dict[str, list[float]]] = {}
    for name, by_setting in rounds[0].items():
        for place, kind in enumerate(CASES[name][1]):
            if kind not in rounds[0]:
                continue
            for setting in by_setting:
                ratios = [each[name][setting][place] / each[kind][first][0] for each in rounds]
                row = rows.setdefault(f"{name}: {kind} {place + 1}", {})
                row[setting] = [statistics.median(ratios), min(ratios), max(ratios)]
    return rows


def show(rows: dict[str, dict[str, list[float]]], title: str, settings: list[str]) -> None:
    print(f"{title:36}" + "".join(f"{setting:>22}" for setting in settings))
    for label, row in rows.items():
        cells = (f"{row[setting][0]:.3f} ({row[setting][1]:.2f} to {row[setting][2]:.2f})" for setting in settings)
        print(f"{label:36}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def work(chosen: argparse.Namespace) -> None:
    """What a worker's process does. Before it measures, it works until the watch has seen what computes beside it."""
    keep_freed_memory()
    for line in sys.stdin:
        kind, seconds = json.loads(line)
        once = one_of(kind, chosen.model, chosen.vocabulary, chosen.sequences, chosen.compile)
        with sharing_cores(chosen.worker.endswith("+watch")):
            speed(once, min(seconds, (QUIET_PERIODS + 2) * PERIOD_S))
            print(json.dumps(speed(once, seconds)), flush=True)


def speed(once: Callable[[], int], seconds: float) -> float:
    """Tokens per second."""
    start, tokens = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        tokens += once()
    return tokens / passed


@functools.cache
def one_of(kind: str, model: str, n_vocab: int, sequences: int, compile_: str) -> Callable[[], int]:
    """A training step, or a short text; returns its number of tokens. It has been called once, so it is compiled."""
    import torch

    config = model_config(model)
    gpt = make_andrea(config, n_vocab, "cpu")
    if kind == "sample":
        engine = Engine(gpt, NumberTokenizer(n_vocab), dtype=torch.bfloat16)
        request = Request(max_new_tokens=64, sampling=Sampling(temperature=0))

        def once() -> int:
            return sum(1 for _ in engine.stream([1], request))
    else:
        precision = choose_precision("auto", torch.device("cpu")).value
        chosen = argparse.Namespace(optimizer="muon", steps=1, compile=compile_)
        text = torch.randint(n_vocab, (1, sequences, config.sequence_length + 1))
        once, _ = andrea_steps(gpt, text, precision, chosen)
    once()
    return once


if __name__ == "__main__":
    main()
