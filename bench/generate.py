"""Tokens per second while writing text, batch 1, greedy: this project and Hugging Face's `generate`, in the same run.

Both sides: same shape and vocabulary, random weights converted once to the precision, the same prompt, exactly
--new-tokens tokens, reading the prompt included. Each contestant has a process of its own and takes turns with the others.
Beside the speeds: the time to the first token after a long prompt, and how near the memory's own speed this project comes:
a token reads every weight but the embedding's once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import (
    NumberTokenizer,
    Report,
    Speeds,
    arguments,
    assert_same_size,
    count_weights,
    interleave,
    make_andrea,
    make_hugging_face,
    model_config,
    serve,
    start_workers,
    synchronise,
)

from andrea.generation import Engine, Request, Sampling
from andrea.generation.packed_layers import NativeLinear, has_native
from andrea.generation.sample_command import BITS
from andrea.runtime.device import LargePages

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
READING = "memory read, in GB"
PEERS = (*DTYPES, *(f"{kind}-static" for kind in DTYPES))  # static: a cache of fixed shapes, compiled where it can be
BYTES = {"int4": 0.5625, "int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["bf16"], help="how Hugging Face's model runs")
    parser.add_argument("--ours", nargs="*", choices=BYTES, default=["bf16", "int8"], help="this project's weights")
    parser.add_argument(
        "--compiled", action="store_true", help="this project's step compiled, on a card as a CUDA graph"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--long-prompt-tokens", type=int, default=512, help="for the time to the first token")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="texts written at a time")
    chosen = arguments(parser)
    if chosen.worker:
        contest(chosen)
        return
    names = [f"hugging face, {kind}" for kind in chosen.peers]
    names += [f"andrea, {kind}{', compiled' if chosen.compiled else ''}" for kind in chosen.ours]
    workers = start_workers([*names, READING])
    assert_same_size(worker.facts["parameters"] for name, worker in workers.items() if name != READING)
    read: list[float] = []  # gigabytes per second, round by round

    def facts() -> dict:
        contestants = {name: worker.facts for name, worker in workers.items() if name != READING}
        return {"contestants": contestants, "read_gigabytes_per_second": read}

    report = Report("generate", chosen, names[0], facts)

    def save(speeds: Speeds) -> None:
        read[:] = speeds.get(READING, [])
        report.save({name: each for name, each in speeds.items() if name != READING})

    speeds = interleave({name: worker.turn for name, worker in workers.items()}, chosen.pairs, save)
    speeds.pop(READING, None)
    if read:
        print(f"\nmemory was read at {statistics.median(read):.1f} GB/s")
        for name, each in speeds.items():
            show_bandwidth(name, workers[name].facts, each, read, chosen)
    report.show(speeds)


def show_bandwidth(name: str, facts: dict, speeds: list[float], read: list[float], chosen: argparse.Namespace) -> None:
    """Print how near a contestant comes to the memory's own speed; `facts` gets the share."""
    shares = [
        speed / chosen.batch * facts["bytes_per_token"] / 1e9 / in_round
        for speed, in_round in zip(speeds, read, strict=False)  # one that was left out has fewer rounds
    ]
    if not shares:
        return
    facts["share_of_bandwidth"] = statistics.median(shares)
    print(
        f"{name:42} first token after {chosen.long_prompt_tokens} others: {facts['first_token_ms']:.0f} ms, "
        f"{facts['bytes_per_token'] / 1e6:.1f} MB a token, {facts['share_of_bandwidth']:.0%} of the bandwidth"
    )


def contest(chosen: argparse.Namespace) -> None:
    """What a contestant's process does."""
    if chosen.worker == READING:
        serve(reader(chosen.device), chosen.device)
        return
    who, kind, *_ = chosen.worker.split(", ")
    config = model_config(chosen.model)
    make = make_hugging_face if who == "hugging face" else make_andrea
    model = make(config, chosen.vocabulary, chosen.device)
    n_weight = count_weights(model)
    n_of_head = chosen.vocabulary * config.d_model
    n_read, precision = n_weight - (0 if config.tied_head else n_of_head), kind.partition("-")[0]
    n_in_8_bits = n_of_head if precision == "int4" else 0  # of the head, which int4 keeps in 8 bits
    writer = hugging_face_writer if who == "hugging face" else andrea_writer
    write = writer(model, kind, chosen)
    first_token_ms = 1000 * median_seconds(lambda: write(chosen.long_prompt_tokens, 1), chosen.device)
    facts = {
        "parameters": n_weight,
        "bytes_per_token": (n_read - n_in_8_bits) * BYTES[precision] + n_in_8_bits,
        "first_token_ms": first_token_ms,
    }
    serve(lambda: write(chosen.prompt_tokens, chosen.new_tokens), chosen.device, **facts)


def prompt_of(n_token: int, chosen: argparse.Namespace) -> torch.Tensor:
    return torch.randint(chosen.vocabulary, (chosen.batch, n_token), generator=torch.Generator().manual_seed(1))


def andrea_writer(model: torch.nn.Module, kind: str, chosen) -> Callable[[int, int], int]:
    dtype = DTYPES.get(kind, torch.bfloat16)
    tokenizer = NumberTokenizer(chosen.vocabulary)
    engine = Engine(model, tokenizer, dtype=dtype, bits=BITS.get(kind), compiled=chosen.compiled)

    def write(n_prompt: int, n_new: int) -> int:
        request = Request(max_new_tokens=n_new, sampling=Sampling(temperature=0))
        return sum(1 for _ in engine.stream_all(prompt_of(n_prompt, chosen).tolist(), request))

    return write


def hugging_face_writer(model: torch.nn.Module, kind: str, chosen) -> Callable[[int, int], int]:
    dtype, _, static = kind.partition("-")
    model = model.to(DTYPES[dtype]).eval().requires_grad_(False)
    cache = {"cache_implementation": "static"} if static else {}

    @torch.inference_mode()
    def write(n_prompt: int, n_new: int) -> int:
        tokens = prompt_of(n_prompt, chosen).to(chosen.device)
        exactly = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False, "pad_token_id": 0}
        written = model.generate(tokens, attention_mask=torch.ones_like(tokens), **exactly, **cache)
        return written.numel() - tokens.numel()

    return write


def reader(device: str) -> Callable[[], float]:
    """Gigabytes read once, by the fastest reader here: torch's sum, or our own product with a single row."""
    numbers = torch.ones(2**28, dtype=torch.bfloat16, device=device)  # more than any cache holds
    if device == "cpu":
        numbers = LargePages(numbers.nbytes).place(numbers)
    readers = [lambda: numbers.view(torch.int64).sum()]
    if has_native(numbers):
        layer, row = NativeLinear(numbers.view(-1, 1024), None), torch.ones(1, 1024, dtype=torch.bfloat16)
        readers.append(lambda: layer(row))
    fastest = min(readers, key=lambda read: median_seconds(read, device))

    def read() -> float:
        for _ in range(20):
            fastest()
        return 20 * numbers.nbytes / 1e9

    return read


def median_seconds(run: Callable, device: str, times: int = 5) -> float:
    """After one run that does not count."""
    seconds = []
    for _ in range(times + 1):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
