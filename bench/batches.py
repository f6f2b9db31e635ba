"""Decoding of N texts at a time: our engine as the server runs it, or llama.cpp as its server does; tokens/s of steps alone.

    python bench/batches.py --checkpoint big --precision bf16
    python bench/batches.py --gguf big-bf16/model.gguf          # the same model, exported; needs llama-cpp-python

Prompts of 48 random tokens are read first and not counted. The likeliest token is taken, so no program pays for sampling rules.
Of three rounds the best counts. Run both commands after each other, and compare the ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

PROMPT_TOKENS, STEPS, ROUNDS = 48, 20, 3
SIZES = (1, 8, 32)


def best_rate(n_text: int, step: Callable[[], None]) -> float:
    """Tokens/s of the best of ROUNDS rounds."""
    rates = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        rates.append(n_text * STEPS / (time.perf_counter() - begun))
    return max(rates)


def prompts(n_text: int, n_vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(300, n_vocab - 10, (n_text, PROMPT_TOKENS), generator=generator).tolist()


def ours(chosen: argparse.Namespace, n_text: int) -> float:
    from andrea.checkpoint.model import open_model
    from andrea.generation import Engine, Request, Sampling
    from andrea.generation.batching import Batch, BatchedText
    from andrea.generation.sample_command import BITS

    _, model, tokenizer = open_model(
        chosen.checkpoint, chosen.runs, torch.device("cpu"), False, report=lambda line: None
    )
    dtype = {"fp32": torch.float32}.get(chosen.precision, torch.bfloat16)
    engine = Engine(model, tokenizer, dtype=dtype, bits=BITS.get(chosen.precision), in_place=True)
    batch = Batch(engine, n_text)
    for number, prompt in enumerate(prompts(n_text, tokenizer.n_vocab)):
        request = Request(PROMPT_TOKENS + ROUNDS * STEPS * 2, seed=number, sampling=Sampling(temperature=0))
        batch.join(BatchedText(engine, prompt, request))
    while not all(text.window.continues(text.tokens) for text in batch.texts):  # until all prompts are read
        batch.step()
    return best_rate(n_text, batch.step)


def llama(chosen: argparse.Namespace, n_text: int) -> float:
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(chosen.gguf).encode(), settings)
    about = llama_cpp.llama_context_default_params()
    about.n_ctx, about.n_seq_max, about.n_batch, about.n_ubatch = 256 * n_text, n_text, 512, 512
    about.n_threads = about.n_threads_batch = chosen.threads
    context = llama_cpp.llama_init_from_model(model, about)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def read(entries: list[tuple[int, int, int]], last: int) -> None:
        """entries: token, place and text. The last `last` of them get scores."""
        batch.n_tokens = len(entries)
        for row, (token, place, text) in enumerate(entries):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = token, place, 1, text
            batch.logits[row] = row >= len(entries) - last
        assert llama_cpp.llama_decode(context, batch) == 0

    def likeliest(row: int) -> int:
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (n_vocab,)).argmax())

    tokens = []
    for text, prompt in enumerate(prompts(n_text, n_vocab)):
        read([(token, place, text) for place, token in enumerate(prompt)], 1)
        tokens.append(likeliest(len(prompt) - 1))
    place = PROMPT_TOKENS

    def step() -> None:
        nonlocal tokens, place
        read([(token, place, text) for text, token in enumerate(tokens)], n_text)
        tokens, place = [likeliest(row) for row in range(n_text)], place + 1

    return best_rate(n_text, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a run of ours, e.g. of model=120m-qwen3")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--precision", choices=["fp32", "bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--gguf", type=Path, help="the same model, exported with to=gguf")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    measure = ours if chosen.gguf is None else llama
    for n_text in SIZES:
        print(f"{n_text:3} texts at a time: {measure(chosen, n_text):7,.0f} tokens/s")


if __name__ == "__main__":
    main()
