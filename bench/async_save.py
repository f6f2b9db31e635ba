"""What an asynchronous save costs the steps that run meanwhile, against a synchronous save of the same sharded run.

    python bench/async_save.py                       # andrea-120m, one rank
    python bench/async_save.py --ranks 2 --rounds 5

A round: quiet steps; a synchronous save; more quiet steps; an asynchronous save, and steps until it is on the disk on all
ranks. The excess is the time of the call and of these steps beyond that of as many quiet steps. Exit code 1 where the
median excess is more than `--limit` of the median synchronous save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, make_andrea, model_config, python_path, write_record

from andrea.config import group_config


def launch(chosen: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=chosen.place) as place:
        result = Path(place) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={chosen.ranks}"]
        torchrun.append("--local-addr=127.0.0.1")  # without it, torchrun may wait for a name server that is not there
        worker = [str(Path(__file__).resolve()), f"--rounds={chosen.rounds}", f"--steps={chosen.steps}"]
        worker += [f"--model={chosen.model}", f"--tokens={chosen.tokens}", f"--worker={place}"]
        subprocess.run([*torchrun, *worker], check=True, env=os.environ | {"PYTHONPATH": python_path()})
        measured = json.loads(result.read_text())
    synchronous = statistics.median(row["synchronous_s"] for row in measured["rounds"])
    excess = statistics.median(row["excess_s"] for row in measured["rounds"])
    print(f"quiet step {measured['quiet_step_s']:.2f} s, checkpoint of {measured['bytes'] / 1e6:.0f} MB")
    print(f"{'synchronous':>12} {'until durable':>14} {'call':>6} {'steps':>6} {'excess':>7}")
    for row in measured["rounds"]:
        times = f"{row['synchronous_s']:10.2f} s {row['durable_s']:12.2f} s {row['call_s']:4.2f} s"
        print(f"{times} {row['steps']:6} {row['excess_s']:5.2f} s")
    print(f"excess / synchronous: {excess / synchronous:.2f} (medians; limit {chosen.limit})")
    summary = {"synchronous_s": synchronous, "excess_s": excess, "ratio": excess / synchronous, "limit": chosen.limit}
    about = {"model": chosen.model, "ranks": chosen.ranks, "tokens": chosen.tokens}
    write_record(chosen.output, "async-save", measured["device"], {**about, **summary, **measured})
    return int(excess > chosen.limit * synchronous)


def work(chosen: argparse.Namespace) -> None:
    """What each rank does."""
    import torch

    from andrea.runtime.device import WEIGHT_DTYPE, choose_device, choose_precision, keep_freed_memory
    from andrea.text.tokenizer import ByteTokenizer
    from andrea.training.loss.loss import MicroBatchLoss
    from andrea.training.optimizer import Optimizer
    from andrea.training.parallel.fsdp import FullySharded
    from andrea.training.parallel.ranks import join_ranks
    from andrea.training.parallel.saver import ShardedSaver

    config, optimizer_config = model_config(chosen.model), group_config("optimizer", "muon")
    parallel_config = group_config("parallel", "fsdp")
    place = Path(chosen.worker)
    device = choose_device("auto")
    if device.type == "cpu":
        keep_freed_memory()
    precision = choose_precision("auto", device).value
    n_vocab = 50257
    with join_ranks(10) as (ranks, _):
        model = make_andrea(config, n_vocab, "cpu")
        dtype = WEIGHT_DTYPE[precision]
        parallel = FullySharded(
            model, ranks, parallel_config, device, dtype, lambda: make_andrea(config, n_vocab, "cpu")
        )
        loss = parallel.wrap(
            MicroBatchLoss(model, device, precision, False, False), "on" if device.type == "cuda" else "off"
        )
        optimizer = Optimizer(parallel, optimizer_config, bf16=precision == "bf16")
        savers = [ShardedSaver(place / name, optimizer, ByteTokenizer(), 1) for name in ("sync", "async")]
        tokens = torch.randint(n_vocab, (1 if device.type == "cpu" else 8, chosen.tokens), device=device)
        state = {"step": 0, "config": {}, "tokens": 0}

        def step() -> float:
            clock = time.perf_counter()
            nats, _ = loss(tokens, tokens)
            (nats / tokens.numel()).backward()
            parallel.set_local_gradients()
            norm = optimizer.clip()
            optimizer.step(1.0, torch.isfinite(norm))
            parallel.zero_gradients()
            float(ranks.sum(norm))  # as the trainer does: all ranks, and the host, wait here
            return time.perf_counter() - clock

        def timed(action) -> float:
            clock = time.perf_counter()
            action()
            float(ranks.sum(torch.zeros(())))
            return time.perf_counter() - clock

        for _ in range(3):
            step()
        rows, quiet = [], []
        for number in range(chosen.rounds):
            state["step"] = number
            quiet += [step() for _ in range(chosen.steps)]
            synchronous = timed(lambda: (savers[0].save(state), savers[0].wait()))
            quiet += [step() for _ in range(chosen.steps)]
            usual = statistics.median(quiet[-2 * chosen.steps :])
            begun = time.perf_counter()
            call = timed(lambda: savers[1].save(state))
            steps_meanwhile = []
            while float(ranks.sum(torch.tensor(float(savers[1].thread.is_alive())))):
                steps_meanwhile.append(step())
            durable = time.perf_counter() - begun
            savers[1].wait()
            rows.append(
                {"synchronous_s": synchronous, "call_s": call, "durable_s": durable, "steps": len(steps_meanwhile),
                 "usual_step_s": usual, "excess_s": call + sum(steps_meanwhile) - usual * len(steps_meanwhile)}
            )  # fmt: skip
        if ranks.is_rank_0:
            folder = next((place / "async" / "checkpoints").glob("step-*"))
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            result = {"device": str(device), "precision": precision, "quiet_step_s": statistics.median(quiet)}
            (place / "result.json").write_text(json.dumps({**result, "bytes": size, "rounds": rows}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="andrea-120m")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="quiet ones before each save")
    parser.add_argument("--tokens", type=int, default=256, help="in a sequence: short steps show small excesses")
    parser.add_argument("--limit", type=float, default=0.30)
    parser.add_argument("--place", help="where checkpoints are written; default: the folder for temporary files")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "async-save-cpu.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen)
        return 0
    return launch(chosen)


if __name__ == "__main__":
    sys.exit(main())
