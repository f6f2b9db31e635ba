"""A tokenizer.json of the tokenizers library: the vocabulary of a model that was trained elsewhere.

Only byte-level tokenizers are taken: those of GPT-2, Llama 3, Qwen, SmolLM, Pythia and their descendants. Their tokens have
known bytes, so bits per byte and text that is written token by token are exact.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, final

import numpy as np

from andrea.config import LARGEST_VOCABULARY, UserError
from andrea.text.shards import token_type
from andrea.text.tokenizer import (
    Tokenizer,
    visible_bytes,
    without_surrogates,
)

HF_FILE = "tokenizer.hf.json"  # the library's file in a folder of ours, whose tokenizer.json is our description


@final
class HfTokenizer(Tokenizer):
    """content: of a tokenizer.json. n_vocab: rows of the model's embedding; rows without a token have no bytes.

    end_of_text: the id that stands in front of every document. Raises UserError for a tokenizer whose tokens have no known
    bytes, or that does not fit n_vocab.
    """

    def __init__(self, content: bytes, end_of_text: int, n_vocab: int, path: Path) -> None:
        import tokenizers

        try:
            self.library = tokenizers.Tokenizer.from_buffer(content)
            plain = json.loads(content)
        except Exception as error:  # the library raises bare exceptions
            raise UserError(
                f"{path} is not a tokenizer.json of the tokenizers library ({error}); copy it again"
            ) from None
        if not is_byte_level(plain):
            raise UserError(
                f"{path} has tokens whose bytes are not known: its decoder is not ByteLevel; only byte-level tokenizers, such as "
                f"those of GPT-2, Llama 3, Qwen and SmolLM, can be read"
            )
        self.library.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self.library.no_truncation()
        self.library.no_padding()
        ids = self.library.get_vocab(with_added_tokens=True).values()
        largest = max(ids, default=-1)
        if end_of_text not in ids or not largest < n_vocab <= LARGEST_VOCABULARY:
            raise UserError(
                f"{path} has token ids up to {largest}, and end-of-text is {end_of_text}, but the model has {n_vocab} tokens (at "
                f"most {LARGEST_VOCABULARY} are possible); name the tokenizer that belongs to the model"
            )
        self.kind, self.content, self.end_of_text, self.n_vocab = "hf", content, end_of_text, n_vocab
        self.digest = hashlib.sha256(content).hexdigest()
        about = hashlib.sha256(f"{self.digest} {end_of_text}".encode()).hexdigest()
        self.identity = f"hf-{n_vocab}-{about[:8]}"
        self.table = [b""] * n_vocab
        byte_of, added = visible_bytes(), set(self.library.get_added_tokens_decoder())
        for token, number in self.library.get_vocab(with_added_tokens=True).items():
            self.table[number] = token.encode() if number in added else bytes(byte_of[each] for each in token)
        self.table[end_of_text] = b""
        self.end_name = self.library.id_to_token(end_of_text) or ""

    def encode_array(self, text: str) -> np.ndarray:
        found = self.library.encode(without_surrogates(text), add_special_tokens=False)
        return np.array(found.ids, dtype=token_type(self.n_vocab))

    def token_bytes(self) -> list[bytes]:
        return self.table

    def save(self, folder: Path) -> None:
        (folder / HF_FILE).write_bytes(self.content)
        super().save(folder)

    def description(self) -> dict[str, str | int]:
        return super().description() | {"sha256": self.digest}


def is_byte_level(plain: dict[str, Any]) -> bool:
    """Whether each token of the vocabulary is written with one visible character per byte."""
    model, decoder = plain.get("model") or {}, plain.get("decoder") or {}
    vocabulary, known = model.get("vocab"), visible_bytes().keys()
    return (
        decoder.get("type") == "ByteLevel"
        and isinstance(vocabulary, dict)
        and all(
            known >= set(token) for token in vocabulary.keys() - {each["content"] for each in plain["added_tokens"]}
        )
    )
