"""transformers as the other program of an import's proof: it loads the source folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from andrea.interop.program import OtherProgram

OWN_CODE = Path(__file__).parent.parent / "hugging_face" / "modeling_andrea.py"


@final
class ImportedByTransformers(OtherProgram):
    """A model of a folder, loaded in fp32 with eager attention. Raises ImportError without transformers.

    Code in the folder is not run, unless it is our own modeling_andrea.py to the letter.
    """

    def __init__(self, folder: Path, end_of_text: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from andrea.interop.hugging_face.program import code_cache

        os.environ.setdefault("HF_MODULES_CACHE", code_cache().name)
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self.name, self.end_of_text = f"transformers {transformers.__version__}", end_of_text
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=is_our_code(folder),
            use_safetensors=True,
            local_files_only=True,
        ).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """With end-of-text in front, which some models have in front of every text, and others between texts."""
        found = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [[self.end_of_text, *ids] for ids in found]

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        prompt = torch.tensor([list(tokens)])
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": n_new}
        return self.model.generate(prompt, **how)[0, len(tokens) :].tolist()


def is_our_code(folder: Path) -> bool:
    code = sorted(folder.glob("*.py"))
    return [path.name for path in code] == [OWN_CODE.name] and code[0].read_bytes() == OWN_CODE.read_bytes()
