"""Counts and names the files and documents of a source that are left out or converted, and the fields that are read."""

from __future__ import annotations

import copy
import errno
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from andrea.runtime.streams import printable

NAMED_AT_MOST = 3
PASSING = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)  # a run without such a file would have other data
FIELDS_NAMED_AT_MOST, FIELD_CHARACTERS = 12, 40
NUMBERED = re.compile(r"(\.\d+)+$")  # libm.so.6 ends in .so


@dataclass
class Findings:
    """Files and documents that were left out or converted, by reason. n_file_left_out: the number of files that are not read."""

    names: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    binary_endings: Counter[str] = field(default_factory=Counter)
    other_fields: dict[str, dict[str, None]] = field(default_factory=dict)  # fields of records whose text is not known
    read_by: Counter[tuple[str, ...]] = field(
        default_factory=Counter
    )  # records by the fields that are read as their text
    n_file_left_out: int = 0

    def leave_out(self, reason: str, name: str) -> None:
        """Count a document as left out."""
        self.add(f"left out {{}} ({reason})", name)

    def leave_out_file(self, reason: str, name: str) -> None:
        self.n_file_left_out += 1
        self.leave_out(reason, name)

    def leave_out_unreadable(self, error: Exception, name: str, reason: str = "unreadable") -> None:
        """Count a file or folder that cannot be read. Raises the error if it may be another one the next time."""
        if isinstance(error, OSError) and error.errno in PASSING:
            raise error
        self.leave_out_file(reason, name)

    def leave_out_binary(self, name: str) -> None:
        """Count a file as left out. Binary files are named by their endings, because there may be many."""
        self.n_file_left_out += 1
        self.binary_endings[PurePosixPath(NUMBERED.sub("", name)).suffix.lower() or "without an ending"] += 1

    def lacks_field(self, wanted: str | None, fields: Iterable[str], name: str, is_file: bool) -> None:
        """Count a record, or a whole file, as left out because it lacks the field `wanted`. fields: its fields."""
        reason = f'without the field "{wanted}"' if wanted else "without a field whose name says that it is text"
        (self.leave_out_file if is_file else self.leave_out)(reason, name)
        self.other_fields.setdefault(f"left out {{}} ({reason})", {}).update(dict.fromkeys(fields))

    def reads_whole(self, what: str, fields: Iterable[str], name: str) -> None:
        """Count a file of records that is read as it stands, because no field is known to be its text."""
        words = f"read {{}} {what} as they stand"
        self.add(words, name)
        self.other_fields.setdefault(words, {}).update(dict.fromkeys(fields))

    def add(self, words: str, name: str) -> None:
        """Count one file or document. words: the event, such as 'left out {} (binary)', with {} in place of the count."""
        self.counts[words] = self.counts.get(words, 0) + 1
        named = self.names.setdefault(words, [])
        if len(named) < NAMED_AT_MOST:
            named.append(printable(name))

    def copy(self) -> Findings:
        return copy.deepcopy(self)

    def lines(self, field_key: str | None = "data.field") -> list[str]:
        """One line for each kind of event. field_key: the key that chooses a field; None: there is no such key."""
        lines = [
            f"the text of {count:,} records is {' + '.join(printable(field) for field in fields)}"
            for fields, count in self.read_by.items()
            if fields != ("text",)
        ]
        for words, count in self.counts.items():
            line = f"{words.format(f'{count:,}')}: {', '.join(self.names[words])}{', …' * (count > NAMED_AT_MOST)}"
            if fields := [printable(name)[:FIELD_CHARACTERS] for name in self.other_fields.get(words, {})]:
                shown = ", ".join(fields[:FIELDS_NAMED_AT_MOST]) + ", …" * (len(fields) > FIELDS_NAMED_AT_MOST)
                line += f" (fields found: {shown}{f'; choose one with {field_key}=…' if field_key else ''})"
            lines.append(line)
        if self.binary_endings:
            ordered = sorted(self.binary_endings.items(), key=lambda item: (-item[1], item[0]))
            endings = ", ".join(f"{count:,} {printable(ending)}" for ending, count in ordered)
            lines.append(f"left out {self.binary_endings.total():,} (binary): {endings}")
        return lines
