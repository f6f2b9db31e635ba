"""Sources of text: from files to documents. Each document is used for training or held out for validation.

A document is a file, or one line or row of a file. It is read in pieces of at most about PIECE_BYTES, so that memory
does not limit the size of a file. Documents that are empty or not text (invalid UTF-8, NUL bytes) are left out; `check`
counts and reports them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

from andrea.config import UserError

Split = Literal["train", "val"]
Report = Callable[[str], None]  # shows one line to the user

PIECE_BYTES = 1 << 20
HELD_OUT_BELOW = 26  # a document is held out if its hash's first byte is less than this: about a tenth of the documents
FEWEST_DOCUMENTS = 10  # with fewer documents, the last tenth of each document is held out
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
NOT_TEXT = "unreadable or not valid UTF-8"
NAMED_AT_MOST = 3


@dataclass(frozen=True)
class Document:
    """One document, which `open` opens for reading."""

    key: str  # relative posix path, with "#index" for a line or a row; its hash decides the split
    size: int  # bytes
    open: Callable[[], BinaryIO]


@dataclass(frozen=True)
class Piece:
    """A part of a document's text, or the whole text."""

    text: str
    begins_document: bool


@dataclass
class LeftOut:
    """The number of unused files and documents for each reason, with the names of the first few."""

    names: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.names.setdefault(reason, [])
        if len(named) < NAMED_AT_MOST:
            named.append(name)

    def lines(self) -> list[str]:
        return [
            f"left out {count:,} ({reason}): {', '.join(self.names[reason])}{', …' if count > NAMED_AT_MOST else ''}"
            for reason, count in self.counts.items()
        ]


class Source:
    """One named source of text. The constructor lists the files; `check`, `pieces` and `documents` read them."""

    def __init__(self, name: str, kind: Literal["pystdlib", "text"], path: Path | None, key: str = "data.path") -> None:
        """key: the configuration key that messages name. Raises UserError if `path` does not exist or has no text file."""
        self.name, self.kind, self.key = name, kind, key
        self.root = path if path is not None else Path(sysconfig.get_paths()["stdlib"])
        if not os.path.exists(self.root):
            raise UserError(f"{key}={self.root} does not exist; name a file or a folder")
        suffixes, folders_left_out = ((".py",), NOT_LIBRARY) if kind == "pystdlib" else (SUFFIXES, set())
        try:
            if self.root.is_file():
                self.files, base = [self.root], self.root.parent
            else:
                self.files, base = list_files(self.root, suffixes, folders_left_out), self.root
            stats = [file.stat() for file in self.files]
        except OSError as error:
            raise UserError(f"{key}={self.root} cannot be read: {error.filename}: {error.strerror}") from error
        if not self.files:
            raise UserError(f"{key}={self.root} holds no {', '.join(suffixes)} file; name a file or folder of text")
        # [name, bytes, time of the last change] of each file, for the hash in the prepared folder's name
        self.listing = [
            [file.relative_to(base).as_posix(), stat.st_size, stat.st_mtime_ns]
            for file, stat in zip(self.files, stats, strict=True)
        ]
        self.bytes = sum(size for _, size, _ in self.listing)

    def check(self, report: Report) -> int:
        """Read all files once, report which documents are left out, and return the number of usable bytes.

        Raises UserError if no document is usable.
        """
        left_out = LeftOut()
        usable = sum(document.size for document in self.every_document(left_out))
        for line in left_out.lines():
            report(f"{self.name}: {line}")
        if not usable:
            raise UserError(
                f"{self.key}={self.root} holds no usable text: {'; '.join(left_out.lines())}; name text files in UTF-8"
            )
        return usable

    def documents(self, split: Split) -> Iterator[str]:
        """The split's documents as whole texts. Each document must fit in memory."""
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
        for document in self.every_document(LeftOut()):
            if self.cuts_documents:
                with document.open() as file:
                    middle = cut_at(file, document.size)
                start, stop = (0, middle) if split == "train" else (middle, document.size)
            elif is_held_out(document.key) == (split == "val"):
                start, stop = 0, document.size
            else:
                continue
            for number, text in enumerate(read_pieces(document, start, stop)):
                yield Piece(text, begins_document=number == 0)

    @cached_property
    def cuts_documents(self) -> bool:
        """Whether the last tenth of each document is held out, instead of whole documents.

        This is the case if there are few documents, or if all their hashes fall into the same split.
        """
        sides, count = set(), 0
        for document in self.every_document(LeftOut()):
            count += 1
            sides.add(is_held_out(document.key))
            if count >= FEWEST_DOCUMENTS and len(sides) == 2:
                return False
        return True

    def every_document(self, left_out: LeftOut) -> Iterator[Document]:
        """The usable documents of both splits in a fixed order. Unusable documents are added to `left_out`."""
        for file, (name, size, _) in zip(self.files, self.listing, strict=True):
            if size == 0:
                left_out.add("empty", name)
            elif file.suffix == ".jsonl":
                yield from documents_of_jsonl(file, name, left_out)
            elif file.suffix == ".parquet":
                yield from documents_of_parquet(file, name, left_out)
            elif not is_text(file):
                left_out.add(NOT_TEXT, name)
            else:
                yield Document(name, size, lambda file=file: open(file, "rb"))


def list_files(root: Path, suffixes: tuple[str, ...], folders_left_out: set[str]) -> list[Path]:
    """The files under `root` with these suffixes, in a fixed order. Hidden files and folders are skipped."""
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in folders_left_out and not name.startswith(".")]
        here = Path(folder)
        paths = [here / name for name in files if name.endswith(suffixes) and not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return [path for _, path in sorted(found)]


def is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[0] < HELD_OUT_BELOW


# ------------------------------------------------------------------------------------------- reading a single file


def is_text(path: Path) -> bool:
    """Whether the whole file is UTF-8 without NUL bytes."""
    try:
        with open(path, "rb") as file:
            return all(b"\0" not in block for block in whole_blocks(file, 0, os.fstat(file.fileno()).st_size))
    except (UnicodeDecodeError, OSError):
        return False


def whole_blocks(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Bytes start … stop in blocks of at most about PIECE_BYTES. A block ends after a line, or else after a character.

    Raises UnicodeDecodeError if a block is not UTF-8.
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
    """The index after the last whole UTF-8 character of `block`."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character; its high bits give the length
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) if back >= length else len(block) - back
    return len(block)


def read_pieces(document: Document, start: int, stop: int) -> Iterator[str]:
    with document.open() as file:
        for block in whole_blocks(file, start, stop):
            yield block.decode()


def cut_at(file: BinaryIO, size: int) -> int:
    """The index of the byte at which the held-out last tenth of a document begins.

    The index is moved forward to the start of the next line, or else to the start of a character.
    """
    cut = size * 9 // 10
    file.seek(cut)
    tail = file.read(min(PIECE_BYTES, size - cut))
    line_end = tail.find(b"\n") + 1
    if 0 < line_end and cut + line_end < size:
        return cut + line_end
    while tail and tail[0] & 0xC0 == 0x80:  # not the first byte of a character
        tail, cut = tail[1:], cut + 1
    return cut


def in_memory(key: str, data: bytes) -> Document:
    return Document(key, len(data), lambda: io.BytesIO(data))


def documents_of_jsonl(path: Path, name: str, left_out: LeftOut) -> Iterator[Document]:
    """One document for each line of JSON: the value of its key "text"."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError:
        left_out.add("unreadable", name)
        return
    with file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                data = text.encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                left_out.add('lines without {"text": …}', f"{name}#{index}")
                continue
            if not data or b"\0" in data:
                left_out.add("empty" if not data else NOT_TEXT, f"{name}#{index}")
                continue
            yield in_memory(f"{name}#{index}", data)


def documents_of_parquet(path: Path, name: str, left_out: LeftOut) -> Iterator[Document]:
    """One document for each row of a parquet file, from the column "text". Raises UserError if pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} is a parquet file and needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            left_out.add('parquet without a column "text"', name)
            return
        index = -1
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            for data in batch.column(0).cast(pyarrow.binary()).to_pylist():
                index += 1
                if not data or not is_utf8(data):
                    left_out.add(NOT_TEXT if data else "empty", f"{name}#{index}")
                    continue
                yield in_memory(f"{name}#{index}", data)
    except (pyarrow.ArrowException, OSError):
        left_out.add("unreadable parquet", name)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
