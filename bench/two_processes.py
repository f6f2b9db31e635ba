"""Two processes on one machine: does each go half as fast as alone?

    python bench/two_processes.py                                # as they come from torch, with 40,000 spins, with turns
    python bench/two_processes.py --settings default 1000+turns  # GOMP_SPINCOUNT=1000, and the processes take turns

A waiting thread first spins, which keeps its core from the other process, and then sleeps. `+turns`: the processes take
turns (andrea/runtime/shared_cores.py). There are two workers for each setting; in a round each measures the first alone,
two runs at once, a run and a sample at once. Shown are ratios within a round, medians over rounds: the speed alone over
that of the first setting (1 = as fast), and the speed at once over the speed alone (0.5 = a fair half).
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from andrea.runtime.device import keep_freed_memory
from andrea.runtime.shared_cores import MACHINE, SPINS, VARIABLES, usable_cores
from train import andrea_steps

KINDS = {"run": ("run",), "sample": ("sample",), "two runs": ("run", "run"), "run and sample": ("run", "sample")}


class Worker:
    """A process with the environment of one setting that works for some seconds when asked to."""

    def __init__(self, setting: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        if setting != "default":
            environment["GOMP_SPINCOUNT"] = setting.removesuffix("+turns")
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
    parser.add_argument(
        "--settings", nargs="+", default=["default", f"{SPINS}", f"{SPINS}+turns"], help="GOMP_SPINCOUNT[+turns]"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--compile", choices=("on", "blocks", "off"), default="blocks")
    parser.add_argument("--sequences", type=int, default=16, help="in a micro-batch of a run")
    parser.add_argument("--model", default="andrea-nano", help="a file of configs/model, without .yaml")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens in the vocabulary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "two-processes-cpu.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen)
        return
    workers = {setting: (Worker(setting), Worker(setting)) for setting in chosen.settings}
    for pair in workers.values():  # compile, and load what is compiled
        for worker in pair:
            for kind in ("run", "sample"):
                worker.ask(kind, 0.1)
                worker.answer()
    settings = {key: value for key, value in vars(chosen).items() if key not in ("output", "worker")}
    rounds: list[dict] = []
    for number in range(chosen.rounds):
        rounds.append({name: {} for name in KINDS if name in chosen.kinds})
        for name, setting in itertools.product(rounds[-1], order(chosen.settings, number)):
            rounds[-1][name][setting] = turn(workers[setting], KINDS[name], chosen.seconds)
        rows = summary(rounds, chosen.settings)
        print(f"\nround {number + 1} of {chosen.rounds}")
        show(rows, chosen.settings)
        write_record(chosen.output, "two-processes", "cpu", {"settings": settings, "results": rows, "rounds": rounds})


def order(settings: list[str], number: int) -> list[str]:
    return settings if number % 2 == 0 else settings[::-1]


def turn(pair: tuple[Worker, Worker], kinds: tuple[str, ...], seconds: float) -> list[float]:
    """The tokens per second of each process that takes part."""
    working = list(zip(pair, kinds, strict=False))
    for worker, kind in working:
        worker.ask(kind, seconds)
    return [worker.answer() for worker, _ in working]


def summary(rounds: list[dict], settings: list[str]) -> dict[str, dict[str, list[float]]]:
    """Ratios [median, lowest, highest] by name of row and setting."""
    rows: dict[str, dict[str, list[float]]] = {}
    for setting in settings:
        for name, kinds in KINDS.items():
            if name not in rounds[0]:
                continue
            for place, kind in enumerate(kinds):
                if len(kinds) == 1:
                    label = f"{kind} alone, over {settings[0]}"
                    ratios = [each[name][setting][0] / each[name][settings[0]][0] for each in rounds]
                else:
                    label = f"{name}: {kind} {place + 1}, over alone"
                    ratios = [each[name][setting][place] / each[kind][setting][0] for each in rounds]
                rows.setdefault(label, {})[setting] = [statistics.median(ratios), min(ratios), max(ratios)]
    return rows


def show(rows: dict[str, dict[str, list[float]]], settings: list[str]) -> None:
    print(f"{'GOMP_SPINCOUNT':36}" + "".join(f"{setting:>22}" for setting in settings))
    for label, row in rows.items():
        cells = (f"{middle:.3f} ({low:.2f} to {high:.2f})" for middle, low, high in row.values())
        print(f"{label:36}" + "".join(f"{cell:>22}" for cell in cells))


def work(chosen: argparse.Namespace) -> None:
    """What a worker's process does."""
    keep_freed_memory()
    if chosen.worker.endswith("+turns"):
        MACHINE.join(usable_cores(), on_wait=lambda: None)
    for line in sys.stdin:
        kind, seconds = json.loads(line)
        once = one_of(kind, chosen.model, chosen.vocabulary, chosen.sequences, chosen.compile)
        start, tokens = time.perf_counter(), 0
        with MACHINE.taken():
            while (passed := time.perf_counter() - start) < seconds:
                MACHINE.pass_on()
                tokens += once()
        print(json.dumps(tokens / passed), flush=True)


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
        chosen = argparse.Namespace(optimizer="muon", steps=1, compile=compile_)
        text = torch.randint(n_vocab, (sequences, config.sequence_length + 1))
        once = andrea_steps(gpt, text, "bf16", chosen)
    once()
    return once


if __name__ == "__main__":
    main()
