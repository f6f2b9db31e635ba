"""Text to token ids and back. V = n_vocab. The special token end_of_text precedes every document and has no bytes.

`ByteTokenizer` has one token for each byte. `RankTokenizer` is byte-pair encoding by tiktoken. The rank of a token is
its id and its priority in merging. `train_bpe` trains new ranks; `load_gpt2` loads GPT-2's; hf_tokenizer.py reads those of
other models. A tokenizer is saved as `tokenizer.json` and, with ranks, `tokenizer.tiktoken`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from andrea.config import LARGEST_VOCABULARY, ON_LARGE_TEXT, TokenizerConfig, UserError
from andrea.runtime.files import from_json, read_plain_file
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
GPT2_FILES = {  # name: (file name in tiktoken's cache = sha1 of its address, sha256 of its content)
    "vocab.bpe": (
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "encoder.json": (
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
}
# Longer texts are encoded in blocks, because tiktoken's regular expression recurses within one part of a text.
BLOCK_CHARACTERS = 1 << 18


class Tokenizer(ABC):
    """Base class of tokenizers. A subclass defines `encode_array` and `token_bytes`."""

    kind: str
    n_vocab: int
    end_of_text: int
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
        if threads == 1 or len(texts) == 1:
            return [self.encode_array(text) for text in texts]
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

    def description(self) -> dict[str, str | int]:
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
        self.kind, self.n_vocab, self.end_of_text = "byte", 257, 256
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
        self.end_of_text, self.n_vocab = len(ranks), len(ranks) + 1
        self.table = [*sorted(ranks, key=lambda token: ranks[token]), b""]
        self.rank_file = b"".join(
            base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.table[:-1])
        )
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

    def description(self) -> dict[str, str | int]:
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
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(TRAINING_PATTERN), "isolated"), byte_level]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - 1,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
        max_token_length=64,  # a whole line of dashes must not become one token
    )
    trainable.train_from_iterator(map(without_surrogates, texts), trainer)
    byte_of = visible_bytes()
    ranks = {bytes([value]): value for value in range(256)}
    for pair in json.loads(trainable.to_str())["model"]["merges"]:
        first, second = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(bytes(byte_of[character] for character in first + second), len(ranks))
    return RankTokenizer("bpe", ranks)


def visible_bytes() -> dict[str, int]:
    """The byte of each character in GPT-2's files, which write each byte as a printable character.

    A byte that is printable stands for itself.
    """
    printable = [value for value in range(256) if chr(value).isprintable() and chr(value) != " "]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


# --------------------------------------------------------------------------------------------------------- loading


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote to `folder`. Raises UserError if a file is missing or damaged."""
    path = folder / DESCRIPTION
    try:
        description = from_json(read_plain_file(path, LARGEST_FILE_BYTES))
        kind, identity = description["kind"], description["identity"]
        if kind in RankTokenizer.KINDS:
            found: Tokenizer = RankTokenizer(kind, read_ranks(folder / RANKS))
        elif kind == "byte":
            found = ByteTokenizer()
        elif kind == "hf":
            from andrea.text.hf_tokenizer import saved_hf_tokenizer

            found = saved_hf_tokenizer(folder, description)
        else:
            raise ValueError(f"unknown kind {kind}")
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): {folder} holds no tokenizer") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); copy it again, or prepare the data again") from error
    if found.description() != description:
        raise UserError(
            f"{path} says that the tokenizer is {identity}, but the files of this folder hold {found.identity}: one of "
            f"them was changed; copy {DESCRIPTION} and {RANKS} again, or prepare the data again"
        )
    return found


def read_ranks(path: Path) -> dict[bytes, int]:
    """bytes -> id of each token, from a rank file. Each line of the file has a token's bytes in base64 and its id.

    Raises UserError if the file is not a valid rank file, and OSError if it cannot be read.
    """
    try:
        fields = [line.split() for line in read_plain_file(path, LARGEST_FILE_BYTES).split(b"\n") if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in fields}
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{path} is not a rank file (lines of base64 and a number); check tokenizer.path") from error
    n_single = sum(len(token) == 1 for token in ranks)
    if n_single != 256 or sorted(ranks.values()) != list(range(len(fields))):
        raise UserError(
            f"{path} is damaged: it must contain all 256 single bytes, and each rank exactly once; copy it again"
        )
    if len(ranks) >= LARGEST_VOCABULARY:
        raise UserError(
            f"{path} holds {len(ranks)} tokens, but at most {LARGEST_VOCABULARY - 1} are possible, and end-of-text; check "
            f"tokenizer.path"
        )
    return ranks


def vocabulary_for(n_byte: int) -> int:
    """The vocabulary size of tokenizer.vocab_size=auto, for a text of n_byte bytes.

    A token of a large vocabulary occurs too seldom in a small text to be learned. Measured at 1.1 MB (bench/README.md).
    """
    largest = int(ON_LARGE_TEXT["tokenizer.vocab_size"])
    share = min(1.0, n_byte / LARGE_TEXT_BYTES)
    return max(SMALLEST_AUTO_VOCABULARY, 64 * round(largest * share**VOCABULARY_GROWTH / 64))


def configured_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that `config` names; None if it must be trained on the corpus. Raises UserError if it is unusable."""
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "gpt2":
        return load_gpt2(config.path)
    if config.kind == "hf":
        return hf_from_path(Path(config.path or "").expanduser())
    if not config.path:
        return None
    found = from_path(Path(config.path).expanduser(), "bpe")
    if config.vocab_size not in (None, "auto", found.n_vocab):
        raise UserError(
            f"tokenizer.path={config.path} holds {found.n_vocab} tokens, not tokenizer.vocab_size={config.vocab_size}; "
            f"set tokenizer.vocab_size={found.n_vocab}"
        )
    return found


def from_path(path: Path, kind: str) -> Tokenizer:
    """The tokenizer in a rank file, a checkpoint or a folder of prepared data. Raises UserError if it is unusable."""
    if not os.path.exists(path):
        raise UserError(
            f"tokenizer.path={path} does not exist; name a .tiktoken rank file or a folder with {DESCRIPTION}"
        )
    if os.path.isfile(path):
        return RankTokenizer(kind, read_ranks(path))
    if not os.path.exists(path / DESCRIPTION):
        raise UserError(
            f"tokenizer.path={path} holds no {DESCRIPTION}; name a checkpoint, prepared data or a rank file"
        )
    found = load_tokenizer(path)
    if found.kind != kind:
        raise UserError(
            f"tokenizer.path={path} holds {found.identity}; choose tokenizer={found.kind} instead of {kind}"
        )
    return found


def hf_from_path(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json of the tokenizers library, or in a checkpoint or prepared data. Raises UserError."""
    from andrea.text.hf_tokenizer import HF_FILE, load_hf_tokenizer

    if not os.path.exists(path):
        raise UserError(f"tokenizer.path={path} does not exist; name a tokenizer.json, or the folder that holds one")
    return load_tokenizer(path) if os.path.exists(path / HF_FILE) else load_hf_tokenizer(path)


def load_gpt2(path: str | None) -> Tokenizer:
    """GPT-2's tokenizer from `path`. If `path` is None, it comes from tiktoken's cache or the network.

    Raises UserError if the tokenizer cannot be read or downloaded.
    """
    if path is None:
        return download_gpt2()
    folder = Path(path).expanduser()
    if os.path.isfile(folder) or os.path.exists(folder / DESCRIPTION) or not os.path.exists(folder):
        found = from_path(folder, "gpt2")
    else:
        found = from_pair(folder)
    if found.n_vocab != 50257:
        raise UserError(
            f"tokenizer.path={path} holds {found.n_vocab} tokens, but GPT-2 has 50257; choose tokenizer=bpe for it"
        )
    return found


def from_pair(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer from its two files, which have their published names or their names in tiktoken's cache."""
    contents = {}
    for name, (cached_name, sha256) in GPT2_FILES.items():
        found = [folder / choice for choice in (cached_name, name) if os.path.isfile(folder / choice)]
        if not found:
            raise UserError(f"tokenizer.path={folder} lacks {name} (or {cached_name}, its name in tiktoken's cache)")
        contents[name] = found[0].read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != sha256:
            raise UserError(f"{found[0]} is damaged: its sha256 differs from that of GPT-2's {name}; copy it again")
    byte_of = visible_bytes()
    merges = [line.split() for line in contents["vocab.bpe"].decode().split("\n")[1:-1]]
    tokens = [*byte_of, *(first + second for first, second in merges)]
    return RankTokenizer("gpt2", {bytes(byte_of[c] for c in token): rank for rank, token in enumerate(tokens)})


def download_gpt2() -> Tokenizer:
    import requests
    import tiktoken

    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except (OSError, ValueError, requests.RequestException) as error:
        names = " and ".join(cached for cached, _ in GPT2_FILES.values())
        raise UserError(
            f"GPT-2's vocabulary is not in tiktoken's cache and cannot be downloaded ({type(error).__name__}); copy "
            f"vocab.bpe and encoder.json into a folder, under these names or under those of the cache ({names}), and set "
            f"tokenizer.path=FOLDER"
        ) from error
    return RankTokenizer("gpt2", ranks)
