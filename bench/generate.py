"""Tokens per second while writing text, batch 1, greedy: this project and Hugging Face's `generate`, in the same run.

Both sides: same shape and vocabulary, random weights converted once to the precision, the same prompt, exactly
--new-tokens tokens, reading the prompt included.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import arguments, interleave, make_andrea, make_hugging_face, model_config, report, same_size

from andrea.generation import Engine, Request, Sampling

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NumberTokenizer:
    """Shows each token as its number, and knows no end: both sides write the same count of tokens."""

    end_of_text = -1

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return " ".join(map(str, tokens)).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--compiled", action="store_true", help="also this project's compiled decoding step")
    chosen = arguments(parser)
    config = model_config(chosen.model)
    dtype = DTYPES[chosen.precision]
    andrea = make_andrea(config, chosen.vocabulary, chosen.device).to(dtype)
    peer = make_hugging_face(config, chosen.vocabulary, chosen.device).to(dtype).eval().requires_grad_(False)
    facts = {"parameters": same_size(andrea, peer)}
    tokens = torch.randint(chosen.vocabulary, (1, chosen.prompt_tokens), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(chosen.device)
    prompt, tokenizer = tokens[0].tolist(), NumberTokenizer(chosen.vocabulary)
    request = Request(max_new_tokens=chosen.new_tokens, sampling=Sampling(temperature=0))

    def ours(engine: Engine) -> int:
        return sum(1 for _ in engine.stream(prompt, request))

    @torch.inference_mode()
    def theirs() -> int:
        count = chosen.new_tokens
        written = peer.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return written.shape[1] - tokens.shape[1]

    eager = Engine(andrea, tokenizer, dtype=dtype)
    name = f"andrea, {chosen.precision}"
    runs = {"hugging face, " + chosen.precision: theirs, name: lambda: ours(eager)}
    if chosen.compiled:
        engine = Engine(andrea, tokenizer, dtype=dtype, compiled=True)
        start = time.perf_counter()
        ours(engine)
        facts["compile_seconds"] = time.perf_counter() - start
        runs[f"{name} compiled"] = lambda: ours(engine)
    report("generate", chosen, interleave(runs, chosen.pairs, chosen.device), next(iter(runs)), facts)


if __name__ == "__main__":
    main()
