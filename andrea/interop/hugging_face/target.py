"""Export to a folder that transformers loads."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from andrea.interop.hugging_face.classes import TOLERANCE, choose_class
from andrea.interop.hugging_face.folder import DTYPES, INDEX, WEIGHTS, write_folder
from andrea.interop.settings import Trained
from andrea.interop.target import OtherProgram, Target
from andrea.model.gpt import GPT

# -------------------------------------------------------------------------------------------------------------- program
# transformers as the other program of a proof: loads an exported folder, and gives logits, token ids and greedy tokens.


@functools.cache
def code_cache() -> tempfile.TemporaryDirectory:
    """The folder to which transformers copies the code of exported folders, in place of the user's cache.

    It is removed when the program ends.
    """
    return tempfile.TemporaryDirectory(prefix="andrea-export-", ignore_cleanup_errors=True)


class LoadedByTransformers(OtherProgram, ABC):
    """A model in fp32 with eager attention, which a subclass loads. Raises ImportError without transformers."""

    LOADING: ClassVar[dict[str, Any]] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: Any

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it warns of texts that are longer than a window
        self.name, self.transformers = f"transformers {transformers.__version__}", transformers

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        prompt = torch.tensor([list(tokens)])
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": n_new}
        return self.model.generate(prompt, **how)[0, len(tokens) :].tolist()


@final
class Transformers(LoadedByTransformers):
    """A model of an exported folder, and its tokenizer. The folder's code is a copy of ours."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_MODULES_CACHE", code_cache().name)
        super().__init__()
        kind = self.transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, trust_remote_code=True, **self.LOADING).eval()
        self.tokenizer = self.transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts))["input_ids"]


# ----------------------------------------------------------------------------------------------------------- the target

USAGE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust})
    model = AutoModelForCausalLM.from_pretrained("{folder}"{trust})
    tokens = tokenizer("{prompt}", return_tensors="pt")
    print(tokenizer.decode(model.generate(**tokens, max_new_tokens=64, do_sample=True, temperature=0.8)[0]))
"""


@final
class HuggingFace(Target):
    package = "transformers"
    replaced = (WEIGHTS, "model-*-of-*.safetensors", INDEX)

    def __init__(self, trained: Trained, dtype: str) -> None:
        """dtype: one of DTYPES. Raises UserError for a model that transformers cannot hold."""
        self.trained, self.dtype = trained, dtype
        self.chosen, self.why = choose_class(trained)
        self.what, self.share = self.chosen.name, TOLERANCE

    def write(self, folder: Path) -> None:
        write_folder(folder, self.trained, self.chosen, self.dtype)

    def rounded_gpt(self) -> GPT:
        kind = DTYPES[self.dtype]
        if kind == torch.float32:
            return self.trained.gpt
        return copy.deepcopy(self.trained.gpt).to(kind).float()

    def open(self, folder: Path) -> Transformers:
        return Transformers(folder)

    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        trust = ", trust_remote_code=True" if self.chosen.is_remote else ""
        return USAGE.format(folder=hub or folder, trust=trust, prompt=prompt)
