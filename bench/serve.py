"""A server under load: requests of mixed lengths, some at a time, some cancelled. Tokens/s, first token, memory, equality.

    python bench/serve.py --model andrea-nano --requests 1000 --concurrent 32 --cancelled 50

Random weights of the shape. `python -m andrea serve` runs in a process of its own. Every text that was not cancelled is then
compared with what the engine of `sample.py` writes alone. --url measures another server with OpenAI's interface by the same
load, without the comparison: llama.cpp's server, or `transformers serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, make_andrea, model_config, python_path, write_record

from andrea.checkpoint import write_checkpoint
from andrea.checkpoint.model import open_model
from andrea.config import group_config, to_plain
from andrea.generation import Engine, Request, Sampling
from andrea.generation.sample_command import BITS
from andrea.text.tokenizer import RankTokenizer

N_ALONE = 20  # requests, one after another, whose first token is compared with that under load
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "int8": "bfloat16", "int4": "bfloat16"}


@dataclass
class Asked:
    """One request and what came of it. text: None if it was cancelled, or lost."""

    prompt: list[int]
    n_new: int
    seed: int
    is_cancelled: bool = False
    text: str | None = None
    n_token: int = 0
    first_s: float = 0.0
    error: str | None = field(default=None)


def tokenizer_of(n_vocab: int) -> RankTokenizer:
    """All bytes, and then pairs of them."""
    tokens = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    return RankTokenizer("bpe", {token: rank for rank, token in enumerate(tokens[: n_vocab - 1])})


def write_model(chosen: argparse.Namespace, runs: Path) -> None:
    tokenizer, config = tokenizer_of(chosen.vocabulary), model_config(chosen.model)
    attention = group_config("attention", "scaled_dot", implementation="auto")
    state = {"step": 0, "tokens": 0, "config": {"model": to_plain(config), "attention": to_plain(attention)}}
    model = make_andrea(config, tokenizer.n_vocab, "cpu")
    write_checkpoint(runs / "random" / "checkpoints", state, model.state_dict(), {}, tokenizer)


def requests_of(chosen: argparse.Namespace) -> list[Asked]:
    draw = random.Random(chosen.seed)
    lengths = lambda most: draw.randint(1, most)  # noqa: E731
    asked = [
        Asked([draw.randrange(256) for _ in range(lengths(chosen.prompt_tokens))], lengths(chosen.new_tokens), seed)
        for seed in range(chosen.requests)
    ]
    for each in draw.sample(asked, min(chosen.cancelled, len(asked))):
        each.is_cancelled, each.n_new = True, 4 * chosen.new_tokens
    return asked


async def ask(client, url: str, model: str, asked: Asked) -> None:
    """One request as a stream. It counts as cancelled when the connection is closed after some events."""
    body = {"model": model, "prompt": asked.prompt, "max_tokens": asked.n_new, "seed": asked.seed, "stream": True}
    body |= {"temperature": 0.8, "stream_options": {"include_usage": True}}
    began, text, n_event = time.perf_counter(), "", 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            asked.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                asked.error = str(chunk["error"])
                return
            n_event += 1
            asked.first_s = asked.first_s or time.perf_counter() - began
            text += "".join(choice["text"] for choice in chunk["choices"])
            asked.n_token = (chunk.get("usage") or {}).get("completion_tokens") or n_event
            if asked.is_cancelled and n_event == 3:
                return
    asked.text = text


async def load(url: str, model: str, all_asked: list[Asked], n_concurrent: int) -> float:
    """Sends the requests, n_concurrent at a time. Returns the seconds that it took."""
    import httpx

    waiting = list(reversed(all_asked))

    async def client_loop() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            while waiting:
                asked = waiting.pop()
                try:
                    await ask(client, url, model, asked)
                except httpx.HTTPError as error:
                    asked.error = repr(error)

    began = time.perf_counter()
    await asyncio.gather(*(client_loop() for _ in range(n_concurrent)))
    return time.perf_counter() - began


def resident_mib(process_id: int) -> float:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024


def measure(url: str, model: str, chosen: argparse.Namespace, process_id: int | None) -> tuple[list[Asked], dict]:
    asked = requests_of(chosen)
    longest = [Asked([7] * chosen.prompt_tokens, 4 * chosen.new_tokens, seed) for seed in range(chosen.concurrent)]
    asyncio.run(load(url, model, longest, chosen.concurrent))  # warm: every place has had its memory
    alone = [Asked(each.prompt, 8, each.seed) for each in asked[:N_ALONE]]
    asyncio.run(load(url, model, alone, 1))
    before = None if process_id is None else resident_mib(process_id)
    seconds = asyncio.run(load(url, model, asked, chosen.concurrent))
    kept = [each for each in asked if not each.is_cancelled]
    firsts = sorted(each.first_s for each in kept)
    found = {
        "seconds": seconds,
        "tokens_per_second": sum(each.n_token for each in asked) / seconds,
        "first_token_ms": {"median": 1000 * statistics.median(firsts), "95 %": 1000 * firsts[int(0.95 * len(firsts))]},
        "first_token_alone_ms": 1000 * statistics.median(each.first_s for each in alone),
        "lost": [each.error or "no text" for each in kept if each.text is None],
        "cancelled": sum(each.is_cancelled for each in asked),
    }
    if process_id is not None:
        time.sleep(1)
        found["memory_mib"] = {"before": before, "after": resident_mib(process_id)}
    return asked, found


def compare(asked: list[Asked], chosen: argparse.Namespace, runs: Path) -> dict:
    """How many of the texts that the server has written equal those that the engine writes alone."""
    import torch

    _, model, tokenizer = open_model("random", str(runs), torch.device("cpu"), trust=False)
    dtype = getattr(torch, PRECISIONS[chosen.precision])
    engine = Engine(model, tokenizer, dtype=dtype, bits=BITS.get(chosen.precision), in_place=True)
    kept = [each for each in asked if each.text is not None][: chosen.compared]
    equal = 0
    for each in kept:
        request = Request(each.n_new, seed=each.seed, sampling=Sampling(temperature=0.8))
        equal += each.text == "".join(token.text for token in engine.stream(each.prompt, request))
    return {"compared": len(kept), "equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="andrea-nano")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--cancelled", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=48, help="the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="the longest text")
    parser.add_argument("--compared", type=int, default=10**9, help="texts that are compared with those written alone")
    parser.add_argument("--threads", default="auto", help="of the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="another server, such as http://127.0.0.1:8080, instead of ours")
    parser.add_argument("--url-model", default="model", help="the model's name there")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "serve.json")
    chosen = parser.parse_args()
    if chosen.url:
        _, found = measure(chosen.url, chosen.url_model, chosen, None)
    else:
        with tempfile.TemporaryDirectory() as place:
            runs = Path(place)
            write_model(chosen, runs)
            keys = [f"runs_dir={runs}", "checkpoint=random", "port=0", "device=cpu", f"precision={chosen.precision}"]
            command = [
                sys.executable,
                "-m",
                "andrea",
                "serve",
                *keys,
                f"max_running={chosen.concurrent}",
                f"threads={chosen.threads}",
            ]
            environment = os.environ | {"PYTHONPATH": python_path()}
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
                try:
                    about = []
                    while "http://" not in (line := process.stderr.readline()):
                        if not line:
                            raise SystemExit("the server did not start:\n" + "".join(about))
                        about.append(line)
                    print("".join(about), end="")
                    asked, found = measure(line.split("/v1")[0], "random", chosen, process.pid)
                finally:
                    process.terminate()
            found |= compare(asked, chosen, runs)
    for name, value in found.items():
        print(f"{name:24} {value}")
    write_record(chosen.output, "serve", "cpu", {"arguments": vars(chosen) | {"output": None}, **found})
    if found["lost"] or found.get("equal") != found.get("compared"):
        sys.exit(1)


if __name__ == "__main__":
    main()
