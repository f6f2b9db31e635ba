"""transformers as the other program of a proof: loads an exported folder, and gives logits, token ids and greedy tokens."""

from __future__ import annotations

import functools
import os
import tempfile
from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from andrea.interop.target import OtherProgram


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
