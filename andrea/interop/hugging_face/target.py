"""Export to a folder that transformers loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import final

import torch

from andrea.interop.hugging_face.classes import TOLERANCE, choose_class
from andrea.interop.hugging_face.folder import DTYPES, INDEX, WEIGHTS, write_folder
from andrea.interop.hugging_face.program import Transformers
from andrea.interop.settings import Trained
from andrea.interop.target import Target
from andrea.model.gpt import GPT

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
