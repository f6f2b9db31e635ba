"""transformers as the other program of a proof: loads an exported folder, and gives logits, token ids and greedy tokens."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from andrea.interop.program import OtherProgram


@functools.cache
def code_cache() -> tempfile.TemporaryDirectory:
    """The folder to which transformers copies the code of exported folders, in place of the user's cache.

    It is removed when the program ends.
    """
    return tempfile.TemporaryDirectory(prefix="andrea-export-", ignore_cleanup_errors=True)


@final
class Transformers(OtherProgram):
    """A model of an exported folder, loaded in fp32 with eager attention. Raises ImportError without transformers."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_MODULES_CACHE", code_cache().name)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it warns of texts that are longer than a window
        self.name = f"transformers {transformers.__version__}"
        loading = {"trust_remote_code": True}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **loading)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **loading
        ).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts))["input_ids"]

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        prompt = torch.tensor([list(tokens)])
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": n_new}
        return self.model.generate(prompt, **how)[0, len(tokens) :].tolist()
