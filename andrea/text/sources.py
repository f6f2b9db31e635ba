"""Where text comes from: named sources, their documents, and which of them are held out for validation.

A document is a file, or a line or a row of one. It is read in pieces of at most about PIECE_BYTES, so that a file of
any size needs no memory; what is not text (bad UTF-8, NUL bytes) or empty is counted, reported and left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from andrea.config import UserError

Split = Literal["train", "val"]
Report = Callable[[str], None]

PIECE_BYTES = 1 << 20
HELD_OUT_BELOW = 26  # of 256: about a tenth of the documents
FEWEST_DOCUMENTS = 10  # with fewer, each document is cut: its last tenth is held out
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
NOT_TEXT = "unreadable or not UTF-8 text"
NAMED_AT_MOST = 3


@dataclass(frozen=True)
class Document:
    key: str  # relative posix path, with "#index" for a line or a row: decides the split
    size: int  # bytes
    open: Callable[[], BinaryIO]


@dataclass(frozen=True)
class Piece:
    text: str
    begins_document: bool


@dataclass
class Skipped:
    """What was left out, by reason."""

    names: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.names.setdefault(reason, [])
        if len(named) < NAMED_AT_MOST:
            named.append(name)

    def lines(self) -> list[str]:
        return [
            f"left out {count:,} {reason}: {', '.join(self.names[reason])}{', …' if count > NAMED_AT_MOST else ''}"
            for reason, count in self.counts.items()
        ]


class Source:
    """One named source of text: `listing` costs a walk of the folders, `pieces` reads."""

    def __init__(self, name: str, kind: Literal["pystdlib", "text"], path: Path | None, key: str = "data.path") -> None:
        """`key` is what messages name. Raises UserError where `path` is missing or holds nothing."""
        self.name, self.kind, self.key = name, kind, key
        self.root = path if path is not None else Path(sysconfig.get_paths()["stdlib"])
        if not os.path.exists(self.root):
            raise UserError(f"{key}={self.root} does not exist; name a file or a folder")
        suffixes = (".py",) if kind == "pystdlib" else SUFFIXES
        left_out = NOT_LIBRARY if kind == "pystdlib" else set()
        try:
            self.files = [self.root] if self.root.is_file() else list_files(self.root, suffixes, left_out)
            self.base = self.root.parent if self.root.is_file() else self.root
            stats = [file.stat() for file in self.files]
        except OSError as error:
            raise UserError(f"{key}={self.root} cannot be read: {error.filename}: {error.strerror}") from error
        if not self.files:
            raise UserError(f"{key}={self.root} holds no {', '.join(suffixes)} file; name a file or folder of text")
        names = [file.relative_to(self.base).as_posix() for file in self.files]
        self.listing = [[name, s.st_size, s.st_mtime_ns] for name, s in zip(names, stats, strict=True)]
        self.bytes = sum(size for _, size, _ in self.listing)
        self._cut: bool | None = None

    def documents(self, split: Split) -> Iterator[str]:
        """Whole documents as text, for readers with memory to spare."""
        parts: list[str] = []
        for piece in self.pieces(split):
            if piece.begins_document and parts:
                yield "".join(parts)
                parts = []
            parts.append(piece.text)
        if parts:
            yield "".join(parts)

    def pieces(self, split: Split) -> Iterator[Piece]:
        """The split's text in a fixed order, in pieces of at most about PIECE_BYTES."""
        for document in self.all_documents(Skipped()):
            if self.cuts_documents:
                with document.open() as file:
                    middle = cut_at(file, document.size)
                start, stop = (0, middle) if split == "train" else (middle, document.size)
            elif held_out(document.key) == (split == "val"):
                start, stop = 0, document.size
            else:
                continue
            for number, text in enumerate(read_pieces(document, start, stop)):
                yield Piece(text, begins_document=number == 0)

    @property
    def cuts_documents(self) -> bool:
        """Whether each document's last tenth is held out: documents are few, or hashing leaves one split empty."""
        if self._cut is None:
            sides, count = set(), 0
            for document in self.all_documents(Skipped()):
                count += 1
                sides.add(held_out(document.key))
                if count >= FEWEST_DOCUMENTS and len(sides) == 2:
                    break
            self._cut = count < FEWEST_DOCUMENTS or len(sides) < 2
        return self._cut

    def all_documents(self, skipped: Skipped) -> Iterator[Document]:
        for file, (name, size, _) in zip(self.files, self.listing, strict=True):
            if size == 0:
                skipped.add("empty", name)
            elif file.suffix == ".jsonl":
                yield from lines_of(file, name, skipped)
            elif file.suffix == ".parquet":
                yield from rows_of(file, name, skipped)
            elif not is_text(file):
                skipped.add(NOT_TEXT, name)
            else:
                yield Document(name, size, lambda file=file: open(file, "rb"))

    def check(self, report: Report) -> int:
        """Read everything once: report what is left out, return usable bytes. Raises UserError where there are none."""
        skipped = Skipped()
        usable = sum(document.size for document in self.all_documents(skipped))
        for line in skipped.lines():
            report(f"{self.name}: {line}")
        if not usable:
            raise UserError(
                f"{self.key}={self.root} holds no usable text: {'; '.join(skipped.lines())}; name text files in UTF-8"
            )
        return usable


def list_files(root: Path, suffixes: tuple[str, ...], left_out: set[str]) -> list[Path]:
    """Files under `root` in a fixed order; hidden files and folders are no part of a corpus."""
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        here = Path(folder)
        paths = [here / name for name in files if name.endswith(suffixes) and not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return [path for _, path in sorted(found)]


def held_out(key: str) -> bool:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[0] < HELD_OUT_BELOW


# -------------------------------------------------------------------------------------------------- inside a file


def is_text(path: Path) -> bool:
    """Whether the whole file is UTF-8 without NUL bytes."""
    try:
        with open(path, "rb") as file:
            return all(b"\0" not in block for block in whole_blocks(file, 0, os.fstat(file.fileno()).st_size))
    except (UnicodeDecodeError, OSError):
        return False


def whole_blocks(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Bytes start … stop in blocks of at most about PIECE_BYTES that end with a line, or at least with a character.

    Raises UnicodeDecodeError where a block is not UTF-8.
    """
    file.seek(start)
    left, rest = stop - start, b""
    while left:
        read = file.read(min(left, PIECE_BYTES))
        if not read:
            break
        left -= len(read)
        block = rest + read
        end = len(block) if not left else block.rfind(b"\n") + 1 or last_character_end(block)
        block, rest = block[:end], block[end:]
        block.decode()
        yield block
    if rest:
        rest.decode()
        yield rest


def last_character_end(block: bytes) -> int:
    """Where the last whole character of `block` ends."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character, which tells its length
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) if back >= length else len(block) - back
    return len(block)


def read_pieces(document: Document, start: int, stop: int) -> Iterator[str]:
    with document.open() as file:
        for block in whole_blocks(file, start, stop):
            yield block.decode()


def cut_at(file: BinaryIO, size: int) -> int:
    """Where a document's last tenth begins: after the first line end from nine tenths on, else at a character."""
    ninth = size * 9 // 10
    file.seek(ninth)
    tail = file.read(min(PIECE_BYTES, size - ninth))
    line_end = tail.find(b"\n") + 1
    if 0 < line_end and ninth + line_end < size:
        return ninth + line_end
    while tail and tail[0] & 0xC0 == 0x80:
        tail, ninth = tail[1:], ninth + 1
    return ninth


def in_memory(key: str, data: bytes) -> Document:
    return Document(key, len(data), lambda: io.BytesIO(data))


def lines_of(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """One document a line of JSON, its "text"."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError:
        skipped.add("unreadable", name)
        return
    with file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                data = text.encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                skipped.add('lines without {"text": …}', f"{name}#{index}")
                continue
            if not data or b"\0" in data:
                skipped.add("empty" if not data else NOT_TEXT, f"{name}#{index}")
                continue
            yield in_memory(f"{name}#{index}", data)


def rows_of(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """One document a row of a parquet file, its column "text"."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} is a parquet file and needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            skipped.add('parquet without a column "text"', name)
            return
        index = -1
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            for data in batch.column(0).cast(pyarrow.binary()).to_pylist():
                index += 1
                if not data or not is_utf8(data):
                    skipped.add(NOT_TEXT if data else "empty", f"{name}#{index}")
                    continue
                yield in_memory(f"{name}#{index}", data)
    except (pyarrow.ArrowException, OSError):
        skipped.add("unreadable parquet", name)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
