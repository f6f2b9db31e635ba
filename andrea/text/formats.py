"""Documents of a file: plain text in several encodings, compressed text, notebooks, lines of JSON, rows of parquet."""

from __future__ import annotations

import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, final

from andrea.config import UserError
from andrea.runtime.files import size_words
from andrea.text.encodings import BINARY, GZIP, PARQUET, Form, OpenFile, is_text, is_utf8, open_converted, recognise
from andrea.text.findings import Findings

NOT_TEXT = "unreadable or not valid UTF-8"
ENCODING_NAMES = {"latin-1": "Latin-1", "cp1252": "Windows-1252", "utf-16": "UTF-16"}
LARGEST_RATIO = 200  # of text to its compressed size; gzip reaches 1000 for one repeated letter, logs perhaps 50
COMPRESSED_SLACK_BYTES = 1 << 12
LARGEST_NOTEBOOK_BYTES = 1 << 28  # a notebook is held in memory
DEFAULT_FIELD, MESSAGES = "text", "messages"


@dataclass(frozen=True)
class Document:
    """One document, which `open` opens for reading."""

    key: str  # relative posix path, with "#index" for a line or a row; its hash decides the split
    size: int  # bytes
    open: Callable[[], IO[bytes]]


def in_memory(key: str, data: bytes) -> Document:
    return Document(key, len(data), lambda: io.BytesIO(data))


def documents_by_ending(path: Path, name: str, size: int, field: str | None, findings: Findings) -> Iterator[Document]:
    """The documents of a file as in earlier versions: its ending tells the format, and text is UTF-8."""
    if path.suffix == ".jsonl":
        yield from documents_of_jsonl(functools.partial(open, path, "rb"), name, (field or DEFAULT_FIELD,), findings)
    elif path.suffix == ".parquet":
        yield from documents_of_parquet(path, name, (field or DEFAULT_FIELD,), findings)
    elif not is_text(path):
        findings.leave_out_file(NOT_TEXT, name)
    else:
        yield Document(name, size, functools.partial(open, path, "rb"))


def documents_by_content(path: Path, name: str, field: str | None, findings: Findings) -> Iterator[Document]:
    """The documents of a file by its content; the ending decides only whether text is lines of JSON or a notebook."""
    fields = (field,) if field else (DEFAULT_FIELD, MESSAGES)
    open_file: OpenFile = functools.partial(open, path, "rb")
    ending = PurePosixPath(name).suffix.lower()
    try:
        with open_file() as file:
            head = file.read(len(PARQUET))
        if head == PARQUET:
            yield from documents_of_parquet(path, name, fields, findings)
            return
        if head.startswith(GZIP):
            open_file = functools.partial(BoundedGzip, path)
            ending = PurePosixPath(name[: -len(ending)]).suffix.lower() if ending else ""
        form = recognise(open_file)
    except TooCompressed:
        findings.leave_out_file(
            f"expands to more than {LARGEST_RATIO} times its size, which text hardly ever does", name
        )
        return
    except (OSError, EOFError, zlib.error):  # of the last two, gzip raises some
        findings.leave_out_file("unreadable", name)
        return
    if not is_usable(form, name, ending, findings):
        return
    if form.encoding not in (None, "utf-8"):
        open_file = functools.partial(open_converted, open_file, form.encoding)
    if ending in (".jsonl", ".ndjson"):
        yield from documents_of_jsonl(open_file, name, fields, findings)
    elif ending == ".ipynb" and form.size > LARGEST_NOTEBOOK_BYTES:
        findings.leave_out_file(f"notebooks of more than {size_words(LARGEST_NOTEBOOK_BYTES)}", name)
    elif ending == ".ipynb" and (cells := cells_of_notebook(open_file)) is not None:
        if cells:
            yield in_memory(name, cells)
        else:
            findings.leave_out_file("empty", name)
    else:
        yield Document(name, form.size, open_file)


class TooCompressed(Exception):
    """A compressed file expands so much that it is hardly text, and may be meant to fill the disk."""


@final
class BoundedGzip(gzip.GzipFile):
    """A .gz file, opened for reading. `read` raises TooCompressed beyond LARGEST_RATIO times the file's size."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.most_bytes = LARGEST_RATIO * (path.stat().st_size + COMPRESSED_SLACK_BYTES)

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > self.most_bytes:
            raise TooCompressed
        return data


def is_usable(form: Form, name: str, ending: str, findings: Findings) -> bool:
    """Whether the file is text. A file that is left out or converted is added to `findings`."""
    if form.encoding is None and ending in (".jsonl", ".ndjson") and form.fault != BINARY:
        return True  # lines that are not UTF-8 are left out one by one
    if form.fault == BINARY:
        findings.leave_out_binary(name)
    elif form.encoding is None:
        findings.leave_out_file(form.fault, name)
    elif form.size == 0:
        findings.leave_out_file("empty", name)
    elif form.encoding != "utf-8":
        findings.add(f"converted {{}} from {ENCODING_NAMES[form.encoding]}", name)
    return form.encoding is not None and form.size > 0


# ------------------------------------------------------------------------------------------------------ notebooks


def cells_of_notebook(open_file: OpenFile) -> bytes | None:
    """The source of each cell, with an empty line between two cells and without outputs; None if it is no notebook."""
    try:
        with open_file() as file:
            notebook = json.load(file)
        sheets = notebook.get("worksheets", [notebook])  # nbformat 3 had sheets, and `input` for code
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        sources = [cell["source"] if "source" in cell else cell["input"] for cell in cells]
        texts = [source if isinstance(source, str) else "".join(source) for source in sources]
        joined = "\n\n".join(text.strip("\n") for text in texts if text.strip())
        return (joined + "\n").encode() if joined else b""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# --------------------------------------------------------------------------------------------------- records


def documents_of_jsonl(
    open_file: OpenFile, name: str, fields: tuple[str, ...], findings: Findings
) -> Iterator[Document]:
    """One document for each line of JSON: the first of `fields` that the line has."""
    try:
        file = open_file()
    except OSError:
        findings.leave_out_file("unreadable", name)
        return
    with file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                findings.leave_out("lines that are no JSON object", f"{name}#{index}")
                continue
            field = next((field for field in fields if field in record), None)
            if field is None:
                findings.lacks_field(fields[0], list(record), f"{name}#{index}", is_file=False)
            elif (data := checked(record[field], field, f"{name}#{index}", findings)) is not None:
                yield in_memory(f"{name}#{index}", data)


def documents_of_parquet(path: Path, name: str, fields: tuple[str, ...], findings: Findings) -> Iterator[Document]:
    """One document for each row of a parquet file, from the first of `fields` that it has.

    Raises UserError if pyarrow is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} is a parquet file and needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        columns = table.schema_arrow
        field = next((field for field in fields if field in columns.names), None)
        if field is None:
            findings.lacks_field(fields[0], columns.names, name, is_file=True)
            return
        kind = columns.field(field).type
        is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        index = -1
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            column = batch.column(0) if is_list else batch.column(0).cast(pyarrow.binary())
            for value in column.to_pylist():
                index += 1
                data = checked(value if value is not None else b"", field, f"{name}#{index}", findings)
                if data is not None:
                    yield in_memory(f"{name}#{index}", data)
    except (pyarrow.ArrowException, OSError):
        findings.leave_out_file("unreadable parquet", name)


def checked(value: Any, field: str, key: str, findings: Findings) -> bytes | None:
    """A record's field as UTF-8. If it is not text, the record is added to `findings`, and the result is None."""
    text = text_of_messages(value) if isinstance(value, list) and field != DEFAULT_FIELD else value
    try:
        data = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:  # half of a surrogate pair
        data = b"\0"
    if not isinstance(data, bytes):
        findings.leave_out(f'the field "{field}" is not text', key)
    elif not data:
        findings.leave_out("empty", key)
    elif not is_utf8(data):
        findings.leave_out(NOT_TEXT, key)
    else:
        return data
    return None


def text_of_messages(messages: list[Any]) -> str | None:
    """A conversation [{"role": …, "content": …}, …] as text: `role: content`, with an empty line between two messages."""
    turns = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        content = message.get("content")
        if isinstance(content, list):  # parts, of which some may be images
            content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
        if isinstance(content, str) and content:  # a call of a tool may have none
            turns.append(f"{message['role']}: {content}")
    return "\n\n".join(turns) + "\n" if turns else ""
