"""Sources of text: from files to documents. Each document is used for training or held out for validation.

A document is a file, or one line or row of a file. It is read in pieces of at most about PIECE_BYTES, so that memory
does not limit the size of a file. Files and documents that are empty or not text are left out; `check` counts and
reports them.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from andrea.config import UserError
from andrea.runtime.files import size_words
from andrea.text.encodings import cut_at, whole_blocks
from andrea.text.findings import Findings
from andrea.text.formats import Document, documents_by_content, documents_by_ending
from andrea.text.listing import Listing, Selection, list_by_content, list_by_ending, selected

Split = Literal["train", "val"]
Report = Callable[[str], None]  # shows one line to the user

HELD_OUT_BELOW = 26  # a document is held out if its hash's first byte is less than this: about a tenth of the documents
FEWEST_DOCUMENTS = 10  # with fewer documents, the last tenth of each document is held out
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
PLAIN_SUFFIXES = (".txt", ".md", ".py")
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}


@dataclass(frozen=True)
class Piece:
    """A part of a document's text, or the whole text."""

    text: str
    begins_document: bool


class Source:
    """One named source of text. The constructor lists the files; `check`, `pieces` and `documents` read them."""

    def __init__(
        self,
        name: str,
        kind: Literal["pystdlib", "text"],
        path: Path | None,
        key: str = "data.path",
        selection: Selection = Selection(),  # noqa: B008 (frozen)
    ) -> None:
        """key: the configuration key that messages name. Raises UserError if `path` does not exist or has no text file."""
        self.name, self.kind, self.key, self.selection = name, kind, key, selection
        self.root = path if path is not None else Path(sysconfig.get_paths()["stdlib"])
        self.reads_only_python = kind == "pystdlib" and path is not None and path.is_dir()  # of a folder of the user
        if not os.path.exists(self.root):
            raise UserError(f"{key}={self.root} does not exist; name a file or a folder")
        try:
            found = self.list_files()
        except OSError as error:
            raise UserError(f"{key}={self.root} cannot be read: {error.filename}: {error.strerror}") from error
        found = selected(found, selection, self.group)
        # [name, bytes, time of the last change, …] of each file, for the hash in the prepared folder's name
        self.files, self.listing, self.unread = found.files, found.entries, found.findings
        if not self.files:
            why = "; ".join(self.unread.lines(self.group))
            endings = "" if selection.by_content else f"{', '.join(self.suffixes)} "
            raise UserError(
                f"{key}={self.root} holds no {endings or 'text '}file{f' ({why})' * bool(why)}; name a file or folder of text"
            )
        self.bytes = sum(size for _, size, *_ in self.listing)

    @property
    def group(self) -> str:
        """The key above `key`: data, or data.sources.NAME."""
        return self.key.rpartition(".")[0]

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (".py",) if self.kind == "pystdlib" else SUFFIXES

    def list_files(self) -> Listing:
        if self.selection.by_content:
            return list_by_content(self.root)
        return list_by_ending(self.root, self.suffixes, NOT_LIBRARY if self.kind == "pystdlib" else set())

    @property
    def hashed(self) -> list[Any]:
        """The facts that are hashed into the prepared folder's name, besides the tokenizer."""
        if not self.selection.by_content and self.selection.field is None:
            return self.listing
        return [
            *self.listing,
            {"name": self.name, "by_content": self.selection.by_content, "field": self.selection.field},
        ]

    def as_by_ending(self) -> Source:
        """This source as an earlier version saw it, with files chosen by their endings: gives the old folder's name."""
        source = copy.copy(self)
        source.selection = Selection()
        source.listing = [entry[:3] for entry in self.listing]
        return source

    @property
    def is_plain(self) -> bool:
        """Whether all files have the endings of plain text. All bytes of such files are read."""
        return all(file.suffix in PLAIN_SUFFIXES for file in self.files)

    def check(self, report: Report) -> int:
        """Read all files once, report which are left out or converted, and return the number of usable bytes.

        Raises UserError if no document is usable.
        """
        findings = self.unread.copy()
        usable = sum(document.size for document in self.every_document(findings))
        lines = findings.lines(self.group)
        if not usable:
            raise UserError(
                f"{self.key}={self.root} holds no usable text: {'; '.join(lines)}; set it to a file or folder with text in UTF-8"
            )
        for line in lines:
            report(f"{self.name}: {line}")
        if findings.n_file_left_out:
            found = len(self.files) + self.unread.n_file_left_out
            report(f"{self.name}: {found - findings.n_file_left_out:,} of {found:,} files are read")
        return usable

    def summary(self) -> str:
        """The number and the size of the files to read: '3 files, 20 kB'."""
        return f"{len(self.files):,} file{'s' * (len(self.files) != 1)}, {size_words(self.bytes)}"

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
        for document in self.every_document(Findings()):
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

        The last tenth is held out if there are few documents, or if the hashes of all documents fall into the same
        split.
        """
        sides, count = set(), 0
        for document in self.every_document(Findings()):
            count += 1
            sides.add(is_held_out(document.key))
            if count >= FEWEST_DOCUMENTS and len(sides) == 2:
                return False
        return True

    def every_document(self, findings: Findings) -> Iterator[Document]:
        """The usable documents of both splits in a fixed order. Unusable ones are added to `findings`."""
        field = self.selection.field
        for file, (name, size, *_) in zip(self.files, self.listing, strict=True):
            if size == 0:
                findings.leave_out_file("empty", name)
            elif self.selection.by_content:
                yield from documents_by_content(file, name, field, findings)
            else:
                yield from documents_by_ending(file, name, size, field, findings)


def is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[0] < HELD_OUT_BELOW


def read_pieces(document: Document, start: int, stop: int) -> Iterator[str]:
    with document.open() as file:
        for block in whole_blocks(file, start, stop):
            yield block.decode()
