"""A tokenizer.json of the tokenizers library: the vocabulary of a model that was trained elsewhere.

Only byte-level tokenizers are taken: those of GPT-2, Llama 3, Qwen, SmolLM, Pythia and their descendants. Their tokens have
known bytes, so bits per byte and text that is written token by token are exact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np

from andrea.config import LARGEST_VOCABULARY, UserError
from andrea.runtime.files import from_json
from andrea.text.shards import token_type
from andrea.text.tokenizer import Tokenizer, visible_bytes, without_surrogates

NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"))
PRE_TOKENIZERS = frozenset(("ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"))
MODEL_KEYS = ("type", "vocab", "merges", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
MOST_STEPS = 16
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
HF_FILE = "tokenizer.hf.json"  # the library's file in a folder of ours, whose tokenizer.json is our description


@final
class HfTokenizer(Tokenizer):
    """content: of a tokenizer.json. n_vocab: rows of the model's embedding; rows without a token have no bytes.

    end_of_text: the id that stands in front of every document. Raises UserError for a tokenizer whose tokens have no known
    bytes, or that does not fit n_vocab.
    """

    def __init__(self, content: bytes, end_of_text: int, n_vocab: int, path: Path) -> None:
        import tokenizers

        plain = what_is_read(content, path)
        with foreign_library(f"{path} cannot be read by the tokenizers library"):
            self.library = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self.library.encode_special_tokens = True  # "<|endoftext|>" in a text is text
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
        with foreign_library("the tokenizer of the model cannot encode a text"):
            found = self.library.encode(without_surrogates(text), add_special_tokens=False)
        return np.array(found.ids, dtype=token_type(self.n_vocab))

    def token_bytes(self) -> list[bytes]:
        return self.table

    def save(self, folder: Path) -> None:
        (folder / HF_FILE).write_bytes(self.content)
        super().save(folder)

    def description(self) -> dict[str, str | int]:
        return super().description() | {"sha256": self.digest}

    def as_read(self) -> dict[str, Any]:
        """The parts of the tokenizer.json that decide a text's ids, for an export."""
        return what_is_read(self.content, Path(HF_FILE))


@contextmanager
def foreign_library(what_fails: str) -> Iterator[None]:
    """Where another program's library reads somebody's file: whatever it raises becomes one line, a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, ImportError):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        line = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise UserError(f"{what_fails} ({line:.200}); copy it again") from None


def what_is_read(content: bytes, path: Path) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide a text's ids. Only kinds and settings listed here reach the library.

    Others can fill the memory (padding to 10^9 tokens, a normalizer that lets texts grow), abort the process, or differ at
    each call (dropout). Raises UserError.
    """
    try:
        plain = from_json(content)
        model, added = plain["model"], plain["added_tokens"]
        if not (plain["decoder"]["type"] == "ByteLevel" and is_visible(model["vocab"], added)):
            raise UserError(
                f"{path} has tokens whose bytes are not known: its decoder is not ByteLevel; only byte-level tokenizers, such as "
                f"those of GPT-2, Llama 3, Qwen and SmolLM, can be read"
            )
        unlike = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
        if model.get("type", "BPE") != "BPE" or unlike:
            raise UserError(f"{path} has a model with {(*unlike, 'type')[0]}, which cannot be read; only plain BPE can")
        normalizer, pre_tokenizer = plain.get("normalizer"), plain.get("pre_tokenizer")
        kinds = [check_steps(normalizer, NORMALIZERS, path), check_steps(pre_tokenizer, PRE_TOKENIZERS, path)]
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a tokenizer.json of the tokenizers library ({error!s:.200}); copy it again"
        ) from None
    if kinds[1].count("ByteLevel") > 1 or max(map(len, kinds)) > MOST_STEPS:  # each ByteLevel doubles a text
        raise UserError(f"{path} has too many steps before its model: {', '.join(kinds[1]):.200}; copy it again")
    kept = {"version": "1.0", "added_tokens": added, "decoder": BYTE_LEVEL, "normalizer": normalizer}
    return kept | {"pre_tokenizer": pre_tokenizer, "model": {key: model[key] for key in MODEL_KEYS if key in model}}


def is_visible(vocabulary: dict[str, int], added: list[dict[str, Any]]) -> bool:
    """Whether each token of the vocabulary is written with one visible character per byte."""
    known = visible_bytes().keys()
    return all(known >= set(token) for token in vocabulary.keys() - {each["content"] for each in added})


def check_steps(step: Any, known: frozenset[str], path: Path) -> list[str]:
    """The kinds of steps in a normalizer or a pre-tokenizer. Raises UserError for one that is not known."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        inner = [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
        return [kind for each in inner for kind in check_steps(each, known, path)]
    if step["type"] not in known:
        raise UserError(
            f"{path} has the step {step['type']!r:.60}, which byte-level tokenizers do not have; known: {', '.join(sorted(known))}"
        )
    return [step["type"]]
