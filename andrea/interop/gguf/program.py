"""llama.cpp as the other program of a proof, through llama-cpp-python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from andrea.interop.target import OtherProgram

GGML_F32 = 0  # ggml's number of the type of fp32


@final
class LlamaCpp(OtherProgram):
    """The model of a GGUF file, with a cache in fp32. Raises ImportError without llama-cpp-python."""

    def __init__(self, path: Path, n_token: int, normalised: Callable[[str], str] | None = None) -> None:
        """n_token: the largest number of tokens that it is asked to read. normalised: what is done to a text before."""
        import llama_cpp

        self.normalised = normalised
        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=n_token,
            n_batch=n_token,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            logits_all=True,
            type_k=GGML_F32,
            type_v=GGML_F32,
            verbose=False,
        )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        self.model.reset()
        self.model.eval(list(tokens))
        return torch.from_numpy(self.model.scores[: len(tokens)].copy())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        prepared = texts if self.normalised is None else map(self.normalised, texts)
        return [self.model.tokenize(text.encode(), add_bos=True, special=False) for text in prepared]

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        chosen: list[int] = []
        self.model.reset()
        self.model.eval(list(tokens))
        while len(chosen) < n_new:
            chosen.append(int(self.model.scores[self.model.n_tokens - 1].argmax()))
            if chosen[-1] == self.model.token_eos():
                break
            self.model.eval(chosen[-1:])
        return chosen
