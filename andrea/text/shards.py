"""Token shards in llm.c's layouts: 256 int32 (magic, version, count, zeros), then `count` tokens, all little-endian.

A token is a uint16 (llm.c's layout for GPT-2), or a uint32 for vocabularies of more than 65,536 tokens (its layout for
Llama 3). Magic and version tell which.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from andrea.config import UserError
from andrea.runtime.system import WINDOWS, resource

MAGIC, VERSION = 20240520, 1
WIDE_MAGIC, WIDE_VERSION = 20240801, 7
LAYOUTS = {(MAGIC, VERSION): np.dtype("<u2"), (WIDE_MAGIC, WIDE_VERSION): np.dtype("<u4")}  # the type of a token
LARGEST_IN_16_BITS = 1 << 16  # tokens of a vocabulary
HEADER_BYTES = 256 * 4
READ_TOKENS = 1 << 24  # number of tokens that are read at a time
REMEDY = "copy it again, or delete its folder and prepare the data again"


def token_type(n_vocab: int) -> np.dtype:
    """The type of the token ids of a vocabulary: uint16 if every id fits, else uint32."""
    return np.dtype("<u2") if n_vocab <= LARGEST_IN_16_BITS else np.dtype("<u4")


class ShardWriter:
    """Append tokens to one file. `close` writes the number of tokens into the header and flushes the file to disk."""

    def __init__(self, path: Path, n_vocab: int = LARGEST_IN_16_BITS) -> None:
        """n_vocab: the number of different tokens, which decides the layout."""
        self.path, self.count, self.digest, self.kind = path, 0, hashlib.sha256(), token_type(n_vocab)
        self.file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        self.file.write(bytes(HEADER_BYTES))

    def append(self, tokens: np.ndarray) -> None:
        assert not len(tokens) or int(np.max(tokens)) <= np.iinfo(self.kind).max, f"a token does not fit {self.kind}"
        data = np.ascontiguousarray(tokens, dtype=self.kind).tobytes()
        self.digest.update(data)
        self.file.write(data)
        self.count += len(tokens)

    def close(self) -> tuple[int, str]:
        """The number of tokens written, and their sha256."""
        header = np.zeros(256, dtype="<i4")
        layout = next(layout for layout, kind in LAYOUTS.items() if kind == self.kind)
        header[:3] = *layout, self.count
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.count, self.digest.hexdigest()


class DataLost(UserError):
    """A shard that was complete at the start can no longer be read."""


class Shard:
    """The tokens of one file: `len(shard)`, and `shard[start:stop]` as `kind` (stop - start,), read from the disk.

    The file is not memory-mapped. If another program cuts a mapped file short, the system ends the process with SIGBUS,
    which Python cannot catch. Reading a file of this class raises DataLost instead. The file stays open, so it may be
    deleted while it is in use.
    """

    def __init__(self, path: Path, file: io.FileIO, count: int, kind: np.dtype) -> None:
        """kind: the type of a token, one of LAYOUTS."""
        self.path, self.file, self.count, self.kind = path, file, count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(self.count)
        assert step == 1, "a shard has no steps"
        size, data = self.kind.itemsize, b""
        n_bytes, offset = max(0, stop - start) * size, HEADER_BYTES + start * size
        try:
            while len(data) < n_bytes and (more := read_at(self.file, n_bytes - len(data), offset + len(data))):
                data += more  # the system reads at most 2 GiB at a time
        except OSError as error:
            raise DataLost(f"{self.path} cannot be read any more ({error.strerror}); {REMEDY}") from error
        if len(data) < n_bytes:
            raise DataLost(f"{self.path} was cut short while it was in use; {REMEDY}")
        return np.frombuffer(data, dtype=self.kind)


SEEKING = threading.Lock()


def read_at(file: io.FileIO, n_bytes: int, offset: int) -> bytes:
    """At most `n_bytes` of the file from `offset` on, also when several threads read. Raises OSError."""
    if not WINDOWS:
        return os.pread(file.fileno(), n_bytes, offset)
    with SEEKING:
        file.seek(offset)
        return file.read(n_bytes)


def open_shard(path: Path) -> Shard:
    """The shard at `path`. Raises UserError if the file is not a complete shard."""
    try:
        file = open_unbuffered(path)
        size = os.fstat(file.fileno()).st_size
        header = np.frombuffer(file.read(12), dtype="<i4") if size >= HEADER_BYTES else None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
    if header is None:
        raise UserError(f"{path} is cut short: it has {size} bytes, and the header alone has {HEADER_BYTES}; {REMEDY}")
    magic, version, count = header.tolist()
    kind = LAYOUTS.get((magic, version))
    if kind is None:
        raise UserError(
            f"{path} is not a token shard: it starts with {magic}, {version} instead of {MAGIC}, {VERSION} or {WIDE_MAGIC}, "
            f"{WIDE_VERSION}; data=shards reads llm.c's .bin layouts, data=text reads text"
        )
    if count < 0 or size != HEADER_BYTES + count * kind.itemsize:
        held = (size - HEADER_BYTES) // kind.itemsize
        raise UserError(f"{path} is damaged: its header says {count} tokens, but the file holds {held}; {REMEDY}")
    return Shard(path, file, count, kind)


def open_unbuffered(path: Path) -> io.FileIO:
    """The open file. If too many files are open, the limit of this process is raised first, as far as the system allows."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        if error.errno != errno.EMFILE or resource is None:
            raise
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return open(path, "rb", buffering=0)


def stamp(stat: os.stat_result) -> list[int]:
    """A file's size, mtime and ctime. If all three are equal, the file is unchanged: no program can set ctime."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def digest_of(paths: Sequence[Path], n_vocab: int) -> str:
    """sha256 of all tokens of shards. Raises UserError if a token is not in the vocabulary."""
    digest = hashlib.sha256()
    for path in paths:
        for tokens in in_blocks(open_shard(path)):
            digest.update(tokens.tobytes())
            if (largest := int(tokens.max())) >= n_vocab:
                raise UserError(
                    f"{path} holds the token {largest}, but the tokenizer has {n_vocab} tokens: the file is damaged, or made "
                    f"with another tokenizer"
                )
    return digest.hexdigest()


class TokenStream:
    """Shards as one sequence of tokens: `len(stream)`, and `stream[start:stop]` as int64 (stop - start,)."""

    def __init__(self, shards: Sequence[Shard | np.ndarray], start: int = 0, stop: int | None = None) -> None:
        """start, stop: the first token of the stream, and the end after its last one; by default, all tokens."""
        self.shards = list(shards)
        self.ends = np.cumsum([0, *(len(shard) for shard in self.shards)])  # of each shard's first token, and the total
        self.start, self.stop = start, int(self.ends[-1]) if stop is None else stop

    @staticmethod
    def open(paths: Sequence[Path]) -> TokenStream:
        """The shards at `paths` as one stream. Raises UserError if a file is not a complete shard."""
        return TokenStream([open_shard(path) for path in paths])

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1, "a token stream supports only slices with step 1"
        start, stop = start + self.start, stop + self.start
        read = np.empty(max(0, stop - start), dtype=np.int64)
        first = int(np.searchsorted(self.ends, start, side="right")) - 1
        for shard, begin in zip(self.shards[first:], self.ends[first:], strict=False):
            if begin >= stop:
                break
            low, high = max(start, int(begin)), min(stop, int(begin) + len(shard))
            read[low - start : high - start] = shard[low - begin : high - begin]
        return read

    def part(self, start: int, stop: int) -> TokenStream:
        """Tokens start … stop - 1 as a stream, without a copy."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        return TokenStream(self.shards, self.start + start, self.start + stop)


def in_blocks(tokens: Shard | TokenStream) -> Iterator[np.ndarray]:
    """All tokens in order, at most READ_TOKENS at a time."""
    for start in range(0, len(tokens), READ_TOKENS):
        yield tokens[start : start + READ_TOKENS]


# --------------------------------------------------------------------------------------------------- existing shards


@dataclass(frozen=True)
class ShardSource:
    """Shards that the user supplies. They are neither copied nor encoded again."""

    name: str
    key: str  # the configuration key that messages name
    root: Path  # a file, or a folder of files
    files: list[Path]
    hashed: list[list[Any]]  # [absolute path, *stamp] of each file, for the prepared folder's name
    kind: ClassVar[str] = "shards"
    is_chat: ClassVar[bool] = False


def find_shards(name: str, path: Path, key: str) -> ShardSource:
    """The .bin files at `path`, a file or a folder. Raises UserError if there are none."""
    if not os.path.exists(path):
        raise UserError(f"{key}={path} does not exist; name a .bin file or a folder of them")
    try:
        files = [path] if path.is_file() else sorted(path.glob("*.bin"))
        stats = [file.stat() for file in files]
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.filename}: {error.strerror}") from error
    if not files:
        raise UserError(f"{key}={path} holds no .bin file; name token shards, or choose data=text for text")
    hashed = [[str(file.resolve()), *stamp(stat)] for file, stat in zip(files, stats, strict=True)]
    return ShardSource(name, key, path, files, hashed)


def split_shards(source: ShardSource) -> tuple[TokenStream, TokenStream]:
    """Training and validation tokens: of the files with "val" in their names, or the last hundredth of all tokens."""
    held_out = [file for file in source.files if "val" in file.name]
    if held_out:
        return TokenStream.open([file for file in source.files if file not in held_out]), TokenStream.open(held_out)
    stream = TokenStream.open(source.files)
    middle = max(0, len(stream) - max(2, len(stream) // 100))
    return stream.part(0, middle), stream.part(middle, len(stream))


# ------------------------------------------------------------------------------------------------------------ windows
# Windows of T tokens with their targets, cut from a stream of tokens. T = sequence_length. `TextWindows` cuts running text;
# `ConversationWindows` (chat.py) keeps conversations whole.

IGNORED_TARGET = -100  # where nothing is to be predicted; torch's default ignore_index


class ReorderedStream:
    """A token stream with its documents in another order, read where they are: `len(stream)`, `stream[start:stop]`."""

    def __init__(self, stream: TokenStream, begins: np.ndarray, order: np.ndarray) -> None:
        """begins (documents,): the first token of each document. order (documents,): the document to read at each place."""
        self.stream, self.begins = stream, begins[order]
        self.ends = np.concatenate([[0], np.cumsum(np.diff(begins, append=len(stream))[order])])

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1, "a token stream supports only slices with step 1"
        place, parts = int(np.searchsorted(self.ends, start, side="right")) - 1, [np.empty(0, dtype=np.int64)]
        while start < stop:
            end = min(stop, int(self.ends[place + 1]))
            shift = int(self.begins[place] - self.ends[place])
            parts.append(self.stream[start + shift : end + shift])
            start, place = end, place + 1
        return np.concatenate(parts)


def document_begins(stream: TokenStream, end_of_text: int) -> np.ndarray:
    """(documents,) int64: the first token of each document. What precedes the first end_of_text counts as a document."""
    n_read, found = 0, [np.zeros(1, np.int64)]
    for tokens in in_blocks(stream):
        found.append(n_read + np.flatnonzero(tokens == end_of_text))
        n_read += len(tokens)
    return np.unique(np.concatenate(found))


class Windows(ABC):
    """The windows of one stream: `len(windows)`. n_token: tokens that are read in an epoch."""

    n_token: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets (n,) int64, n ≤ T, of a window. The target of a token is the token after it, or IGNORED_TARGET."""

    @abstractmethod
    def count_targets(self, windows: np.ndarray) -> int:
        """The number of targets in these windows. No token is read."""


@final
class TextWindows(Windows):
    """A stream of N tokens in ceil((N-1)/T) windows. Every token but the first is a target once."""

    def __init__(self, stream: TokenStream | ReorderedStream, sequence_length: int) -> None:
        self.stream, self.sequence_length = stream, sequence_length
        self.n_token = max(0, len(stream) - 1)

    def __len__(self) -> int:
        return -(-self.n_token // self.sequence_length)

    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        start = int(window) * self.sequence_length
        read = self.stream[start : start + self.sequence_length + 1]
        return read[:-1], read[1:]

    def count_targets(self, windows: np.ndarray) -> int:
        return int(np.clip(self.n_token - windows * self.sequence_length, 0, self.sequence_length).sum())
