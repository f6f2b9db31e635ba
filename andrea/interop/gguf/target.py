"""Export to a GGUF file, which llama.cpp and the programs built on it load."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.interop.gguf.architectures import choose_architecture
from andrea.interop.gguf.file import check_file, rounded_gpt, write_file
from andrea.interop.gguf.tokenizer import gguf_tokenizer
from andrea.interop.proof import LONGEST_WINDOW
from andrea.interop.settings import Trained
from andrea.interop.target import OtherProgram, Target
from andrea.model.gpt import GPT

# -------------------------------------------------------------------------------------------------------------- program
# llama.cpp as the other program of a proof, through llama-cpp-python.

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


# ----------------------------------------------------------------------------------------------------------- the target

# Tolerances as shares of the largest logit, about five times what was measured: llama.cpp rounds activations too.
ROUNDED = {"f16": 2e-3, "bf16": 1e-2, "q8_0": 3e-2}
LEAST = 1e-4
NOT_NORMALISED = (
    "; llama.cpp does not bring text into Unicode's form NFC, as the model's tokenizer does, so token ids are compared on texts "
    "in this form"
)

USAGE = """\
    llama-cli -m {folder}/model.gguf -p "{prompt}" -n 64            # a program of llama.cpp
    llama-server -m {folder}/model.gguf                              # the same, with a web page

    from llama_cpp import Llama                                      # pip install llama-cpp-python
    print(Llama("{folder}/model.gguf")("{prompt}", max_tokens=64)["choices"][0]["text"])
"""

HUB_USAGE = """\
    llama-cli -hf {hub} -p "{prompt}" -n 64                         # a program of llama.cpp
    llama-server -hf {hub}                                           # the same, with a web page

    from llama_cpp import Llama                                      # pip install llama-cpp-python huggingface_hub
    model = Llama.from_pretrained("{hub}", "model.gguf")
    print(model("{prompt}", max_tokens=64)["choices"][0]["text"])
"""


@final
class Gguf(Target):
    package = "llama-cpp-python"
    least = LEAST

    def __init__(self, trained: Trained, dtype: str) -> None:
        """Raises UserError for a model, a tokenizer or a type that the file cannot hold, and without the package gguf."""
        self.trained, self.dtype = trained, dtype
        self.architecture = choose_architecture(trained)
        self.tokenizer = gguf_tokenizer(trained.tokenizer)
        check_file(trained, dtype)
        if importlib.util.find_spec("gguf") is None:
            raise UserError('to=gguf needs the package gguf; run: pip install gguf (or pip install -e ".[interop]")')
        self.what = self.architecture.name
        self.why = f"llama.cpp's architecture {self.what} computes the same function"
        if self.tokenizer.normalised is not None:
            self.why += NOT_NORMALISED
        self.share = max(self.architecture.tolerance, ROUNDED.get(dtype, 0.0))

    def write(self, folder: Path) -> None:
        write_file(folder / "model.gguf", self.trained, self.architecture, self.tokenizer, self.dtype)

    def rounded_gpt(self) -> GPT:
        return rounded_gpt(self.trained.gpt, self.dtype)

    def open(self, folder: Path) -> LlamaCpp:
        return LlamaCpp(
            folder / "model.gguf", min(self.trained.model.sequence_length, LONGEST_WINDOW), self.tokenizer.normalised
        )

    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        return HUB_USAGE.format(hub=hub, prompt=prompt) if hub else USAGE.format(folder=folder, prompt=prompt)
