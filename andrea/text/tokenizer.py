"""Text to token ids and back. V = n_vocab. The special token end_of_text precedes every document and has no bytes.

`ByteTokenizer` has one token for each byte. `RankTokenizer` is byte-pair encoding by tiktoken. The rank of a token is
its id and its priority in merging. `train_bpe` trains new ranks; `load_gpt2` loads GPT-2's; load_tokenizer.py reads those of
other models. A tokenizer is saved as `tokenizer.json` and, with ranks, `tokenizer.tiktoken`.
"""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from andrea.config import ON_LARGE_TEXT
from andrea.text.shards import token_type

DESCRIPTION, RANKS = "tokenizer.json", "tokenizer.tiktoken"
END_OF_TEXT = "<|endoftext|>"
LARGE_TEXT_BYTES = 8_000_000  # from this size on, a text gets the largest vocabulary of tokenizer.vocab_size=auto
VOCABULARY_GROWTH = 0.7  # of this vocabulary with the size of a smaller text, as a power
SMALLEST_AUTO_VOCABULARY = 512
LARGEST_FILE_BYTES = 1 << 26  # of a tokenizer; a rank file of the largest vocabulary has about 20 MB
# Text is split into parts, and no token spans two parts (Radford et al. 2019). A part is a contraction such as 's, a word,
# a number, a sequence of other characters, or whitespace. A single space belongs to the part after it.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# The pattern for training limits the length of a part, because training on a very long part could take hours.
TRAINING_PATTERN = PATTERN.replace("+", "{1,64}")
# Longer texts are encoded in blocks, because tiktoken's regular expression recurses within one part of a text.
BLOCK_CHARACTERS = 1 << 18


class Tokenizer(ABC):
    """Base class of tokenizers. A subclass defines `encode_array` and `token_bytes`."""

    kind: str
    n_vocab: int
    end_of_text: int
    ends: tuple[int, ...]  # the tokens with which a generated text ends
    special: Mapping[str, int] = {}  # name -> id of the tokens of turns, in a tokenizer for chat
    identity: str  # kind, size, and the first 8 hex digits of the content's sha256, such as bpe-4096-1a2b3c4d

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """The ids (n,) of a text, of type `token_type(V)`. "<|endoftext|>" in the text is ordinary text; lone surrogates
        become U+FFFD."""

    @abstractmethod
    def token_bytes(self) -> list[bytes]:
        """The bytes of each of the V tokens; empty for end_of_text."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as in `encode_array`."""
        return self.encode_array(text).tolist()

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """The ids (n,) of each text, as in `encode_array`, in the order of `texts`."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.encode_array, texts))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of all tokens, concatenated."""
        table = self.token_bytes()
        return b"".join(table[token] for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        """The number of bytes of each token, (V,) int64; 0 for end_of_text."""
        return np.array([len(entry) for entry in self.token_bytes()], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and the ranks if the tokenizer has any; `load_tokenizer` reads them."""
        (folder / DESCRIPTION).write_text(json.dumps(self.description(), indent=1) + "\n", encoding="utf-8")

    def description(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        return {
            "kind": self.kind,
            "n_vocab": self.n_vocab,
            "end_of_text": self.end_of_text,
            "identity": self.identity,
        }


@final
class ByteTokenizer(Tokenizer):
    """One token for each byte value of UTF-8, and end_of_text: V = 257."""

    def __init__(self) -> None:
        self.kind, self.n_vocab, self.end_of_text, self.ends = "byte", 257, 256, (256,)
        self.identity = f"byte-257-{hashlib.sha256(bytes(range(256))).hexdigest()[:8]}"

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(without_surrogates(text).encode(), dtype=np.uint8).astype(token_type(self.n_vocab))

    def token_bytes(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)] + [b""]


@final
class RankTokenizer(Tokenizer):
    """Byte-pair encoding. ranks: bytes of a token -> its id 0 … V-2. All single bytes are tokens; end_of_text is V-1."""

    KINDS: ClassVar[tuple[str, ...]] = ("bpe", "gpt2")

    def __init__(self, kind: str, ranks: dict[bytes, int]) -> None:
        import tiktoken

        assert kind in self.KINDS and sorted(ranks.values()) == list(range(len(ranks))), "ranks are 0 … V-2"
        self.kind, self.ranks = kind, ranks
        self.end_of_text, self.n_vocab, self.ends = len(ranks), len(ranks) + 1, (len(ranks),)
        self.table = [*sorted(ranks, key=lambda token: ranks[token]), b""]
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.table[:-1])]
        self.rank_file = b"".join(lines)
        self.digest = hashlib.sha256(self.rank_file).hexdigest()
        content = hashlib.sha256(f"{PATTERN}\n{self.digest}".encode()).hexdigest()
        self.identity = f"{kind}-{self.n_vocab}-{content[:8]}"
        self.encoding = tiktoken.Encoding(
            self.identity, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.end_of_text}
        )

    def encode_array(self, text: str) -> np.ndarray:
        text = without_surrogates(text)
        parts = [
            self.encoding.encode_to_numpy(text[start : start + BLOCK_CHARACTERS], disallowed_special=())
            for start in range(0, len(text), BLOCK_CHARACTERS)
        ]
        kind = token_type(self.n_vocab)
        return np.concatenate(parts, dtype=kind, casting="unsafe") if parts else np.zeros(0, kind)

    def token_bytes(self) -> list[bytes]:
        return self.table

    def save(self, folder: Path) -> None:
        (folder / RANKS).write_bytes(self.rank_file)
        super().save(folder)

    def description(self) -> dict[str, Any]:
        return super().description() | {"pattern": PATTERN, "sha256": self.digest}


def without_surrogates(text: str) -> str:
    """`text` in a form that UTF-8 can encode: surrogate pairs are joined, and lone surrogates become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# -------------------------------------------------------------------------------------------------------- training


def train_bpe(texts: Iterable[str], n_vocab: int) -> RankTokenizer:
    """Train byte-pair encoding (Sennrich et al. 2016) on UTF-8 bytes. V = n_vocab, or less if the text has too few pairs."""
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainable

    trainable = Trainable(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = pre_tokenizers.Split(Regex(TRAINING_PATTERN), "isolated")
    trainable.pre_tokenizer = pre_tokenizers.Sequence([parts, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - 1,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
        max_token_length=64,  # a whole line of dashes must not become one token
    )
    trainable.train_from_iterator(map(without_surrogates, texts), trainer)
    byte_of = visible_bytes()
    ranks = {bytes([value]): value for value in range(256)}
    for first, second in json.loads(trainable.to_str())["model"]["merges"]:
        ranks.setdefault(bytes(byte_of[character] for character in first + second), len(ranks))
    return RankTokenizer("bpe", ranks)


def visible_bytes() -> dict[str, int]:
    """The byte of each character in GPT-2's files, which write every byte as a printable character."""
    printable = [value for value in range(256) if chr(value).isprintable() and chr(value) != " "]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


def vocabulary_for(n_byte: int) -> int:
    """The vocabulary size of tokenizer.vocab_size=auto, for a text of n_byte bytes.

    A token of a large vocabulary occurs too seldom in a small text to be learned. Measured at 1.1 MB (bench/README.md).
    """
    largest = int(ON_LARGE_TEXT["tokenizer.vocab_size"])
    share = min(1.0, n_byte / LARGE_TEXT_BYTES)
    return max(SMALLEST_AUTO_VOCABULARY, 64 * round(largest * share**VOCABULARY_GROWTH / 64))
