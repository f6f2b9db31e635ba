"""transformers as the other program of an import's proof: it loads the source folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from andrea.interop.hugging_face.program import LoadedByTransformers

OWN_CODE = Path(__file__).parent.parent / "hugging_face" / "modeling_andrea.py"


@final
class ImportedByTransformers(LoadedByTransformers):
    """A model of a folder, and its tokenizer. Code in the folder is not run, unless it is our modeling_andrea.py to the letter."""

    def __init__(self, folder: Path, end_of_text: int) -> None:
        super().__init__(folder, trusted=is_our_code(folder), use_safetensors=True, local_files_only=True)
        self.end_of_text = end_of_text
        self.tokenizer = self.transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """With end-of-text in front, which some models have in front of every text, and others between texts."""
        found = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [[self.end_of_text, *ids] for ids in found]


def is_our_code(folder: Path) -> bool:
    code = sorted(folder.glob("*.py"))
    return [path.name for path in code] == [OWN_CODE.name] and code[0].read_bytes() == OWN_CODE.read_bytes()
