"""Prompts and sampling settings, given to a tiny model of each tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from andrea.api.command_line import read
from andrea.config import SampleConfig, lay_over, parse
from andrea.generation.engine import Engine, Request
from andrea.generation.sample_command import read_prompt
from andrea.generation.sampling import Sampling
from andrea.text.load_tokenizer import load_gpt2
from andrea.text.tokenizer import ByteTokenizer, Tokenizer, train_bpe, without_surrogates
from fuzzing.composed import composed, tiny_model
from fuzzing.raw_values import any_text, repeated, wild_text
from fuzzing.trial import Handler

GPT2_CACHE = Path(__file__).resolve().parents[3] / "shared" / "data" / "tiktoken-cache"

megabyte = st.builds(
    lambda text, characters: text * -(-characters // len(text)),
    st.text(st.characters(exclude_categories=()), min_size=1, max_size=4),
    st.just(1 << 20),
)
prompts_text = st.one_of(*[any_text] * 20, *[wild_text] * 10, *[st.text(max_size=400)] * 10, *[repeated] * 2, megabyte)
positive_numbers = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0, 1e9, 1e300]))
sampling_words = st.fixed_dictionaries(
    {},
    optional={
        "temperature": positive_numbers,
        "top_k": st.sampled_from([1, 2, 5, 256, 257, 10**9, 2**63, 10**30]),
        "top_p": st.one_of(st.floats(0, 1), st.sampled_from([1e-300, 0.0, 1.0])),
        "min_p": st.one_of(st.floats(0, 1), st.sampled_from([1e-300, 0.0, 1.0])),
        "repetition_penalty": positive_numbers,
        "seed": st.sampled_from([0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40]),
        "num_samples": st.sampled_from([1, 1, 2, 3, 10**6, 10**18]),
        "max_new_tokens": st.sampled_from([1, 2, 3, 3, 3, 40, 10**12, 2**63]),
        "stop": any_text,
    },
)
usual_words = st.sampled_from([{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"num_samples": 2, "stop": "e"}])
prompts = st.tuples(
    st.sampled_from(["byte", "bpe", "gpt2"]), prompts_text, st.one_of(usual_words, usual_words, sampling_words)
)


def make_prompts(folder: Path) -> Handler:
    tokenizers: dict[str, Tokenizer] = {"byte": ByteTokenizer(), "bpe": train_bpe([Path(__file__).read_text()], 400)}
    if GPT2_CACHE.is_dir():
        tokenizers["gpt2"] = load_gpt2(str(GPT2_CACHE))
    engines = {
        name: Engine(tiny_model(tokenizer.n_vocab, tokenizer.end_of_text), tokenizer, dtype=torch.float32)
        for name, tokenizer in tokenizers.items()
    }

    def handle(tried: tuple[str, str, dict[str, Any]]) -> None:
        name, text, given = tried
        engine = engines.get(name, engines["byte"])
        words = [f"prompt={text}", *(f"{key}={value}" for key, value in given.items())]
        line = read(SampleConfig, words)
        run = parse(SampleConfig, lay_over(copy.deepcopy(composed(SampleConfig, ())), line.values))
        assert run.prompt == text
        if text != "-":  # - reads standard input
            read_prompt(run.prompt)
        tokenizer = engine.tokenizer
        ids = tokenizer.encode_array(text)
        assert int(ids.max(initial=0)) < tokenizer.n_vocab
        assert tokenizer.decode(ids.tolist()) == without_surrogates(text)
        request = Request(
            run.max_new_tokens,
            run.num_samples,
            run.seed,
            tuple(run.stop),
            Sampling(run.temperature, run.top_k, run.top_p, run.min_p, run.repetition_penalty),
        )
        tokens = engine.encode(text)
        if run.max_new_tokens * run.num_samples <= 200:  # more would only take time
            for piece in engine.stream(tokens, request):
                piece.text.encode()

    return handle
