"""Documents of a file: plain text in several encodings, compressed text, notebooks, and records, each a document.

A record is a line of JSON, an object of a JSON array, a row of a table or of a parquet file. Its text:

    {"text": …}                                            as it stands
    {"messages": [{"role": …, "content": …}, …]}           "role: content", with an empty line between two messages
    {"conversations": [{"from": "human", "value": …}, …]}  ShareGPT: the same; human is user, gpt is assistant
    {"instruction": …, "input": …, "output": …}            alpaca: "user: …", "assistant: …", as in a conversation
    {"prompt": …, "completion": …}                         the completion follows the prompt without a space
    {"prompt": …, "chosen": …, "rejected": …}              two answers to a prompt, of which the first is preferred

The names stand for others, too (SINGLE, PAIRS). A field that the user names is read instead.
"""

import csv
import functools
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, final

from andrea.config import UserError
from andrea.runtime.files import size_words
from andrea.text.chat import ASSISTANT, SYSTEM, USER, Turn
from andrea.text.encodings import (
    BINARY,
    GZIP,
    PARQUET,
    PIECE_BYTES,
    UTF_8_MARK,
    Form,
    OpenFile,
    is_utf8,
    open_converted,
    recognise,
    whole_blocks,
)
from andrea.text.listing import Findings

NOT_TEXT = "unreadable or not valid UTF-8"
ENCODING_NAMES = {
    "latin-1": "Latin-1", "cp1252": "Windows-1252", "utf-16": "UTF-16", "utf-32": "UTF-32",
    "utf-16-le": "UTF-16 without a byte-order mark", "utf-16-be": "UTF-16 without a byte-order mark",
    "utf-8-sig": "UTF-8 with a byte-order mark",
}  # fmt: skip
TRAILING = "left out the bytes after the compressed text of {}"
LARGEST_RATIO = 200  # of text to its compressed size; gzip reaches 1000 for one repeated letter, logs perhaps 50
COMPRESSED_SLACK_BYTES = 1 << 12
LARGEST_NOTEBOOK_BYTES = 1 << 28  # a notebook, a record or a table's cell is held in memory
JSON_LINES, TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv")
WITH_RECORDS = (*JSON_LINES, *TABLES, ".json", ".ipynb")
BETWEEN = re.compile(r"[\s,]*")  # what stands between two values of a JSON array
DAMAGED_REST = "the rest of a damaged list of records"
SINGLE = ("text", "messages", "conversations", "conversation")
PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("prompt", "completion"), ("prompt", "response"),
    ("question", "answer"), ("question", "response"), ("input", "output"),
)  # fmt: skip
INSTRUCTIONS, CONTEXT = ("system", "system_prompt"), ("input", "context")  # read with a pair, if they are there
CONTINUED = ("prompt", "completion")
PREFERENCE = ("chosen", "rejected")
ROLES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}


@dataclass(frozen=True)
class Document:
    """One document, which `open` opens for reading."""

    key: str  # relative posix path, with "#index" for a record; its hash decides the split
    size: int  # bytes
    open: Callable[[], IO[bytes]]
    turns: tuple[Turn, ...] = ()  # of a conversation
    rejected: tuple[Turn, ...] = ()  # the conversation that `turns`, and the document's text, are preferred to


@dataclass(frozen=True)
class Wanted:
    """What is read of a record. field: the one that the user names; None: the first that `fields_of` knows.

    is_chat: conversations are read, also where a field `text` holds the same once more, as in alpaca's files.
    """

    field: str | None = None
    is_chat: bool = False


def read_pieces(document: Document, start: int, stop: int) -> Iterator[str]:
    with document.open() as file:
        for block in whole_blocks(file, start, stop):
            yield block.decode()


def in_memory(key: str, data: bytes, turns: Sequence[Turn] = (), rejected: Sequence[Turn] = ()) -> Document:
    return Document(key, len(data), lambda: io.BytesIO(data), tuple(turns), tuple(rejected))


def documents_of(path: Path, name: str, wanted: Wanted, findings: Findings) -> Iterator[Document]:
    """The documents of a file by its content; the ending decides only which text is records or a notebook."""
    open_file: OpenFile = functools.partial(open, path, "rb")
    ending = PurePosixPath(name).suffix.lower()
    trailing: set[str] = set()
    try:
        with open_file() as file:
            head = file.read(len(PARQUET))
        if head == PARQUET or ending == ".parquet":
            yield from documents_of_parquet(path, name, wanted, findings)
            return
        if head.startswith(GZIP):
            open_file = functools.partial(open_gzip, path, trailing)
            if ending not in WITH_RECORDS:  # the text may be compressed without another ending
                ending = PurePosixPath(name[: -len(ending)]).suffix.lower()
        form = recognise(open_file)
    except TooCompressed:
        why = f"expands to more than {LARGEST_RATIO} times its size, which text hardly ever does"
        findings.leave_out_file(why, name)
        return
    except (OSError, EOFError, zlib.error) as error:  # of the last two, gzip raises some
        findings.leave_out_unreadable(error, name)
        return
    if trailing:
        findings.add(TRAILING, name)
    if not is_usable(form, name, ending, findings):
        return
    if form.encoding not in (None, "utf-8"):
        open_file = functools.partial(open_converted, open_file, form.encoding)
    whole = Document(name, form.size, open_file)
    if ending in JSON_LINES:
        yield from documents_of_jsonl(open_file, name, wanted, findings)
    elif ending in TABLES:
        yield from documents_of_table(whole, "\t" if ending == ".tsv" else None, wanted, findings)
    elif ending == ".json":
        yield from documents_of_json(whole, wanted, findings)
    elif ending == ".ipynb" and form.size > LARGEST_NOTEBOOK_BYTES:
        findings.leave_out_file(f"notebooks of more than {size_words(LARGEST_NOTEBOOK_BYTES)}", name)
    elif ending != ".ipynb" or (cells := cells_of_notebook(open_file)) is None:
        yield whole
    elif cells:
        yield in_memory(name, cells)
    else:
        findings.leave_out_file("empty", name)


class TooCompressed(Exception):
    """A compressed file expands so much that it is hardly text, and may be meant to fill the disk."""


@final
class BoundedGzip(gzip.GzipFile):
    """A .gz file, opened for reading. `read` raises TooCompressed beyond LARGEST_RATIO times the file's size.

    Bytes after the compressed text are left out, as gzip does; `trailing` then gets an entry.
    """

    def __init__(self, path: Path, trailing: set[str]) -> None:
        super().__init__(path, "rb")
        self.most_bytes, self.trailing = LARGEST_RATIO * (path.stat().st_size + COMPRESSED_SLACK_BYTES), trailing

    def read(self, size: int | None = -1) -> bytes:
        try:  # at most one block, so that nothing is lost if what follows is no gzip; open_gzip asks again
            data = super().read1(size if size and size > 0 else PIECE_BYTES)
        except gzip.BadGzipFile as error:
            if not self.tell() or not str(error).startswith("Not a gzipped file"):
                raise
            self.trailing.add(str(self.name))
            return b""
        if self.tell() > self.most_bytes:
            raise TooCompressed
        return data

    def readinto(self, buffer: memoryview) -> int:
        """What a BufferedReader calls. Since Python 3.14 that of GzipFile does not call `read`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def open_gzip(path: Path, trailing: set[str]) -> IO[bytes]:
    return io.BufferedReader(BoundedGzip(path, trailing), PIECE_BYTES)


def is_usable(form: Form, name: str, ending: str, findings: Findings) -> bool:
    """Whether a file of this form is read. What is left out or converted is added to `findings`."""
    if ending in JSON_LINES and form.encoding is None and form.fault != BINARY:
        return True  # lines that are not UTF-8 are left out one by one
    if form.fault == BINARY:
        findings.leave_out_binary(name)
    elif form.encoding is None:
        findings.leave_out_file(form.fault, f"{name} ({form.place})" if form.place else name)
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
        return (joined + "\n").encode(errors="replace") if joined else b""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# --------------------------------------------------------------------------------------------------- records


def documents_of_jsonl(open_file: OpenFile, name: str, wanted: Wanted, findings: Findings) -> Iterator[Document]:
    """One document for each line of JSON."""
    with open_file() as file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield from documents_of_record(record, f"{name}#{index}", wanted, findings)


def documents_of_json(whole: Document, wanted: Wanted, findings: Findings) -> Iterator[Document]:
    """One document for each object of a JSON array, or of each line. A file without such records is read as it stands."""
    values, of_lines = values_of_array(whole.open), first_of_lines(whole.open)
    first = of_lines or next(values, None)
    if not isinstance(first, dict):
        yield whole
    elif wanted.field is None and not fields_of(first, wanted):
        findings.add("read {} lists of records as they stand", whole.key, first)
        yield whole
    elif usable_fields(list(first), wanted, whole.key, findings):
        if of_lines:
            yield from documents_of_jsonl(whole.open, whole.key, wanted, findings)
            return
        for index, value in enumerate(itertools.chain([first], values)):
            yield from documents_of_record(value, f"{whole.key}#{index}", wanted, findings)


def first_of_lines(open_file: OpenFile) -> Any:
    """The object in the first line of a file, if its second line is another, as in many published .json files; else None."""
    with open_file() as file:
        try:
            first, second = (json.loads(file.readline(PIECE_BYTES)) for _ in range(2))
        except (ValueError, RecursionError):
            return None
    return first if isinstance(first, dict) and isinstance(second, dict) else None


def values_of_array(open_file: OpenFile) -> Iterator[Any]:
    """The values of a JSON array, of which one is in memory at a time; last DAMAGED_REST, if the array does not end well."""
    decoder, at = json.JSONDecoder(), 1
    with io.TextIOWrapper(open_file(), "utf-8", newline="") as file:
        text = file.read(PIECE_BYTES).lstrip()
        if not text.startswith("["):
            return
        while True:
            at = BETWEEN.match(text, at).end()
            if text.startswith("]", at):
                if text[at + 1 :].strip() or file.read(PIECE_BYTES).strip():  # as of two arrays, one after the other
                    yield DAMAGED_REST
                return
            try:
                value, end = decoder.raw_decode(text, at)
                if end == len(text) and isinstance(value, (int, float)):
                    raise ValueError("the number may go on")
                at = end
            except (ValueError, RecursionError):
                text, at = text[at:], 0
                more = file.read(max(PIECE_BYTES, len(text)))  # twice as much each time: a long value is decoded seldom
                if not more or len(text) > LARGEST_NOTEBOOK_BYTES:
                    yield DAMAGED_REST
                    return
                text += more
            else:
                yield value


def documents_of_table(
    whole: Document, delimiter: str | None, wanted: Wanted, findings: Findings
) -> Iterator[Document]:
    """One document for each row of a table with a header. A table without a known column is read as it stands.

    delimiter: None: of , ; tab and |, the one that the header has most often.
    """
    csv.field_size_limit(LARGEST_NOTEBOOK_BYTES)
    with io.TextIOWrapper(whole.open(), "utf-8", newline="") as lines:
        start = lines.readline(PIECE_BYTES)
    delimiter = delimiter or max(",;\t|", key=start.count)
    is_quoted = delimiter != "\t" or quotes_match(whole.open, delimiter)  # few programs quote where tabs separate
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    with io.TextIOWrapper(whole.open(), "utf-8", newline="") as lines:
        rows = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting)
        columns = [column.strip() for column in next(rows_of(rows), (None, ""))[0] or []]
        if wanted.field is None and not fields_of(columns, wanted):
            if len(columns) > 1:
                findings.add("read {} tables as they stand", whole.key, columns)
            yield whole
        elif usable_fields(columns, wanted, whole.key, findings):
            for index, (row, place) in enumerate(rows_of(rows)):
                if row is None or len(row) != len(columns):
                    findings.leave_out("rows that do not have the header's columns", f"{whole.key}#{index}{place}")
                else:
                    record = dict(zip(columns, row, strict=True))
                    yield from documents_of_record(record, f"{whole.key}#{index}", wanted, findings)


def rows_of(rows: Any) -> Iterator[tuple[list[str] | None, str]]:
    """Each row of csv.reader(strict=True) that is not empty, and which lines it took if these are several; None: not CSV."""
    while True:
        first = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            row = None
        if row != []:
            yield row, f" (lines {first:,} to {rows.line_num:,})" * (rows.line_num > first)


def quotes_match(open_file: OpenFile, delimiter: str) -> bool:
    with io.TextIOWrapper(open_file(), "utf-8", newline="") as lines:
        return all(row is not None for row, _ in rows_of(csv.reader(lines, delimiter=delimiter, strict=True)))


def documents_of_parquet(path: Path, name: str, wanted: Wanted, findings: Findings) -> Iterator[Document]:
    """One document for each row of a parquet file. Raises UserError if pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} is a parquet file and needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        columns = table.schema_arrow.names
        if fields := usable_fields(columns, wanted, name, findings):
            batches = table.iter_batches(batch_size=256, columns=list(fields))
            for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
                yield from documents_of_record(row, f"{name}#{index}", wanted, findings)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:  # the last of text that is not UTF-8
        findings.leave_out_unreadable(error, name, "unreadable parquet")


def usable_fields(columns: list[str], wanted: Wanted, name: str, findings: Findings) -> tuple[str, ...]:
    """`fields_of` a table's columns. If there are none, or a name is that of several columns, the file is left out."""
    fields = fields_of(columns, wanted)
    if not fields:
        findings.lacks_field(wanted.field, columns, name, is_file=True)
    for field in fields:
        if columns.count(field) > 1:
            findings.leave_out_file(f'with several columns named "{field}"', name)
            return ()
    return fields


def documents_of_record(record: Any, key: str, wanted: Wanted, findings: Findings) -> Iterator[Document]:
    """The document of a record. A record without text is added to `findings`."""
    if not isinstance(record, dict):
        findings.leave_out(record if record == DAMAGED_REST else "records that are no JSON object", key)
        return
    fields = fields_of(record, wanted)
    if not fields:
        findings.lacks_field(wanted.field, record, key, is_file=False)
        return
    turns, rejected = (turns_of(record, fields), []) if fields[-2:] != PREFERENCE else pair_of(record) or (None, [])
    values = [record[field] if record[field] is not None else "" for field in fields]
    if len(fields) == 1 and not isinstance(values[0], list):
        text = values[0]
    elif fields == CONTINUED and all(isinstance(value, str) for value in values):
        text = "".join(values)
    else:
        text = None if turns is None else as_text(turns)
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if not isinstance(data, bytes):
        findings.leave_out(f'the field "{" + ".join(fields)}" is not text', key)
    elif not (data := data.removeprefix(UTF_8_MARK)):
        findings.leave_out("empty", key)
    elif not is_utf8(data + as_text(rejected).encode(errors="surrogatepass")):  # also half of a surrogate pair
        findings.leave_out(NOT_TEXT, key)
    else:
        findings.read_by[fields] += 1
        yield in_memory(key, data, turns or (), rejected)


# ----------------------------------------------------------------------------------------------- the text of a record


def fields_of(names: Collection[str], wanted: Wanted) -> tuple[str, ...]:
    """The fields to read of a record with the fields `names`, in order. Empty: none is known to be the record's text."""
    if wanted.field is not None:
        return (wanted.field,) if wanted.field in names else ()
    if wanted.is_chat and "text" in names:
        return fields_of(set(names) - {"text"}, wanted) or ("text",)
    if set(PREFERENCE) <= set(names) and "text" not in names:
        return (*(["prompt"] if "prompt" in names else []), *PREFERENCE)
    for single in SINGLE:
        if single in names:
            return (single,)
    for question, answer in PAIRS:
        if question in names and answer in names:
            return tuple(dict.fromkeys(name for name in (*INSTRUCTIONS, question, *CONTEXT, answer) if name in names))
    return ()


def as_text(turns: Sequence[Turn]) -> str:
    """ "role: content", with an empty line between two turns."""
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in turns) + "\n" if turns else ""


def turns_of(record: dict[str, Any], fields: tuple[str, ...] | None = None) -> list[Turn] | None:
    """The turns of a record that is a conversation, or a question with its answer; else None. fields: of `fields_of`."""
    fields = fields_of(record, Wanted(is_chat=True)) if fields is None else fields
    if fields[-2:] == PREFERENCE:
        pair = pair_of(record)
        return pair and pair[0]
    values = [record[field] if record[field] is not None else "" for field in fields]
    if values and all(isinstance(value, list) for value in values):  # TRL's prompt and completion are messages, too
        return turns_of_messages([message for value in values for message in value])
    if len(fields) == 1 or not all(isinstance(value, str) for value in values):
        return None
    roles = [SYSTEM if field in INSTRUCTIONS else ASSISTANT if field == fields[-1] else USER for field in fields]
    turns = []
    for role, entries in itertools.groupby(zip(roles, values, strict=True), key=lambda entry: entry[0]):
        content = "\n\n".join(value for _, value in entries if value)  # a question and its context are one turn
        turns += [Turn(role, content)] if content else []
    return turns


def pair_of(record: dict[str, Any]) -> tuple[list[Turn], list[Turn]] | None:
    """The conversations with the chosen and with the rejected answer of a record, in the forms of TRL; None if it has none.

    The answers are texts, or messages that follow the prompt or hold it. Both conversations begin alike, and end with the
    assistant.
    """
    prompt, *sides = (
        turns_of_messages(value)
        if isinstance(value, list)
        else [Turn(role, value)]
        if value and isinstance(value, str)
        else []
        for role, value in ((USER, record.get("prompt")), *((ASSISTANT, record[name]) for name in PREFERENCE))
    )
    if prompt is None or not all(sides):
        return None
    chosen, rejected = (side if side[0].role != ASSISTANT else [*prompt, *side] for side in sides)
    fits = chosen[0] == rejected[0] and chosen[0].role != ASSISTANT and chosen != rejected
    return (chosen, rejected) if fits and chosen[-1].role == rejected[-1].role == ASSISTANT else None


def turns_of_messages(messages: list[Any]) -> list[Turn] | None:
    """The turns of a list of messages, without empty ones; None if an entry is no message."""
    turns = []
    for message in messages:
        role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
        if not isinstance(role, str):
            return None
        content = message["content"] if message.get("content") is not None else message.get("value")
        if isinstance(content, list):  # parts, of which some may be images
            content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
        if not isinstance(content, str | None):
            return None
        if content:  # a call of a tool may have none
            turns.append(Turn(ROLES.get(role, role), content))
    return turns
