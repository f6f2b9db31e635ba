"""Sources of text: from files to documents. Each document is used for training or held out for validation.

A document is a file, or one record of a file. It is read in pieces of at most about PIECE_BYTES, so that memory
does not limit the size of a file. Files and documents that are empty or not text are left out; `check` counts and
reports them.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from andrea.config import SourceConfig, UserError
from andrea.runtime.files import size_words
from andrea.text.chat import ASSISTANT, ROLES, Turn
from andrea.text.encodings import cut_at
from andrea.text.formats import Document, Wanted, documents_of, read_pieces
from andrea.text.held_out import HELD_OUT_FILE, HeldOut
from andrea.text.listing import PASSING, UNMATCHED, Findings, list_python, list_text, selected

Split = Literal["train", "val"]
Report = Callable[[str], None]  # shows one line to the user

READER = 3  # changes with what is read of the same files, so that they are prepared again
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}


@dataclass(frozen=True)
class Piece:
    """A part of a document's text, or the whole text."""

    text: str
    begins_document: bool
    turns: tuple[Turn, ...] = ()  # of a conversation, which is one piece
    rejected: tuple[Turn, ...] = ()  # of a preference pair: the conversation with the other answer


class Source:
    """One named source of text. The constructor lists the files; `check` and `pieces` read them."""

    def __init__(
        self,
        name: str,
        kind: Literal["pystdlib", "text", "chat", "pairs"],
        path: Path | None,
        key: str = "data.path",
        config: SourceConfig = SourceConfig("text"),  # noqa: B008 (frozen)
    ) -> None:
        """kind: pairs are read where data=chat has two answers to each prompt, of which one is preferred.

        key: for messages. config: its include, exclude and field are read. Raises UserError if `path` has no text file.
        """
        self.name, self.kind, self.key, self.field = name, kind, key, config.field
        self.is_chat = kind in ("chat", "pairs")
        self.root = path if path is not None else Path(sysconfig.get_paths()["stdlib"])
        self.place = f"{key}={self.root}"  # as messages name it
        self.reads_only_python = kind == "pystdlib" and path is not None and path.is_dir()  # of a folder of the user
        if not os.path.exists(self.root):
            raise UserError(f"{self.place} does not exist; name a file or a folder")
        try:
            found = list_python(self.root, NOT_LIBRARY) if kind == "pystdlib" else list_text(self.root)
        except OSError as error:
            if error.errno in PASSING:
                raise
            raise UserError(f"{self.place} cannot be read: {error.filename}: {error.strerror}") from error
        found = selected(found, config, self.prefix)
        # [name, bytes, time of the last change, …] of each file, for the hash in the prepared folder's name
        self.files, self.listing, self.unread = found.files, found.entries, found.findings
        self.usable_bytes: int | None = None  # of `check`
        self.found: Findings | None = None  # by `check`
        names, is_library = [name for name, *_ in self.listing], kind == "pystdlib"
        self.held_out = HeldOut(self.documents_again, names, self.place, self.is_chat, is_library)
        if not self.files:
            why = "; ".join(self.unread.lines())
            sought = ".py" if kind == "pystdlib" else "text"
            remedy = "data=text reads text" if kind == "pystdlib" else "name a file or folder of text"
            raise UserError(f"{self.place} holds no {sought} file{f' ({why})' * bool(why)}; {remedy}")
        self.bytes = sum(size for _, size, *_ in self.listing)

    @property
    def prefix(self) -> str:
        """What stands before the source's other keys: 'data.', 'data.sources.NAME.', or ''."""
        return self.key.rpartition(".")[0] + "." * ("." in self.key)

    @property
    def hashed(self) -> list[Any]:
        """The facts that are hashed into the prepared folder's name, besides the tokenizer."""
        if self.kind == "pystdlib":
            return self.listing
        return [*self.listing, {"name": self.name, "field": self.field, "reader": READER}]

    def check(self, report: Report) -> int:
        """Read all files once, report which are left out or converted, and return the number of usable bytes.

        The second time, the number is returned at once. Raises UserError if no document is usable, or none has the field
        that was asked for.
        """
        if self.usable_bytes is not None:
            return self.usable_bytes
        n_file = len(self.files)
        report(f"{self.name}: reading {n_file:,} file{'s' * (n_file != 1)}, {size_words(self.bytes)}")
        if self.reads_only_python:
            report(f"{self.name}: only Python files are read; data=text reads all text files of {self.root}")
        findings = self.unread.copy()
        usable = sum(document.size for document in self.every_document(findings))
        self.found = findings
        lines = findings.lines(f"{self.prefix}field")
        if not usable:
            raise UserError(
                f"{self.place} holds no usable text{': ' * bool(lines)}{'; '.join(lines)}; name other files"
            )
        if self.field is not None and not findings.read_by:
            raise UserError(f"{self.prefix}field={self.field} is in no record of {self.place}; leave it out")
        for line in lines:
            report(f"{self.name}: {line}")
        if findings.n_file_left_out:
            found = n_file + self.unread.n_file_left_out
            report(f"{self.name}: {found - findings.n_file_left_out:,} of {found:,} files are read")
        if (copies := self.held_out.copies) and not self.held_out.cuts_documents:
            copied = f"{sum(copies.values()):,} documents are copies of {len(copies):,} texts"
            report(f"{self.name}: {copied}; all copies of a text are for training, or all for validation")
        if n_twice := self.held_out.held_out_twice():
            twice = f"{n_twice:,} conversations of {HELD_OUT_FILE}"
            report(f"{self.name}: {twice} are training conversations too, so that their validation says little")
        self.usable_bytes = usable
        return usable

    def unmatched(self) -> list[str]:
        """A line for include or exclude if a glob matches no file: a mistake of this command, also where the text is prepared."""
        return [line for line in self.unread.lines() if line.partition(":")[0].endswith(UNMATCHED)]

    def pieces(self, split: Split) -> Iterator[Piece]:
        """The split's text in a fixed order, in pieces of at most about PIECE_BYTES."""
        for document in self.documents_again():
            if self.is_chat:
                if self.held_out.is_held_out(document) == (split == "val"):
                    text = "".join(read_pieces(document, 0, document.size))
                    rejected = document.rejected if self.kind == "pairs" else ()
                    yield Piece(text, begins_document=True, turns=document.turns, rejected=rejected)
                continue
            if self.held_out.cuts_documents:
                with document.open() as file:
                    middle = cut_at(file, document.size)
                start, stop = (0, middle) if split == "train" else (middle, document.size)
            elif self.held_out.is_held_out(document) == (split == "val"):
                start, stop = 0, document.size
            else:
                continue
            for number, text in enumerate(read_pieces(document, start, stop)):
                yield Piece(text, begins_document=number == 0)

    def documents_again(self) -> Iterator[Document]:
        """The documents of `every_document`, after `check` has read them. Raises UserError if others are usable now.

        A file that has been removed, or may not be read any more, would otherwise be missing in silence.
        """
        findings = self.unread.copy()
        yield from self.every_document(findings)
        if self.found is not None and findings != self.found:
            now = "; ".join(findings.lines()) or "every file can be read"
            raise UserError(f"{self.place}: files have changed while they were read; start again ({now})")

    def every_document(self, findings: Findings) -> Iterator[Document]:
        """The usable documents of both splits in a fixed order. Unusable ones are added to `findings`."""
        for file, (name, *_) in zip(self.files, self.listing, strict=True):
            for document in documents_of(file, name, Wanted(self.field, self.is_chat), findings):
                if not self.is_chat or is_conversation(document, findings, self.kind == "pairs"):
                    yield document


def is_conversation(document: Document, findings: Findings, is_paired: bool) -> bool:
    """Whether the document is a conversation with an answer; with is_paired, with two. If not, it is added to `findings`."""
    if is_paired and document.turns and not document.rejected:
        findings.leave_out('conversations without the fields "chosen" and "rejected"', document.key)
        return False
    if document.rejected and not is_paired:
        findings.add("read the chosen answers alone of {} pairs; objective=dpo learns from both", document.key)
    roles = {turn.role for turn in (*document.turns, *document.rejected)}
    if not roles:
        findings.leave_out("documents that are no conversation", document.key)
    elif other := roles - set(ROLES):
        findings.leave_out(f"conversations with the role {min(other)!r:.40}", document.key)
    elif ASSISTANT not in roles:
        findings.leave_out("conversations in which the assistant says nothing", document.key)
    return bool(roles) and not roles - set(ROLES) and ASSISTANT in roles


def texts_at(path: Path, key: str, field: str | None, report: Report) -> list[str]:
    """The documents of a file or folder as whole texts, as training reads them. key: for messages. Raises UserError."""
    source = Source(path.resolve().name, "text", path, key, SourceConfig("text", field=field))
    source.check(report)
    return ["".join(read_pieces(document, 0, document.size)) for document in source.documents_again()]
