"""Counts and names the files and documents of a source that are left out or converted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from andrea.runtime.streams import printable

NAMED_AT_MOST = 3
FIELDS_NAMED_AT_MOST = 12
NUMBERED = re.compile(r"(\.\d+)+$")  # libm.so.6 ends in .so


@dataclass
class Findings:
    """Files and documents that were left out or converted, by reason. n_file_left_out: the number of files that are not read."""

    names: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    binary_endings: Counter[str] = field(default_factory=Counter)
    other_fields: dict[str, dict[str, None]] = field(default_factory=dict)  # fields of records that lack the field read
    n_file_left_out: int = 0

    def leave_out(self, reason: str, name: str) -> None:
        """Count a document as left out."""
        self.add(f"left out {{}} ({reason})", name)

    def leave_out_file(self, reason: str, name: str) -> None:
        self.n_file_left_out += 1
        self.leave_out(reason, name)

    def leave_out_binary(self, name: str) -> None:
        """Count a file as left out. Binary files are named by their endings, because there may be many."""
        self.n_file_left_out += 1
        self.binary_endings[PurePosixPath(NUMBERED.sub("", name)).suffix.lower() or "without an ending"] += 1

    def lacks_field(self, wanted: str, fields: list[str], name: str, is_file: bool) -> None:
        """Count a document, or a whole file, as left out because it lacks the field `wanted`. fields: its fields."""
        reason = f'without the field "{wanted}"'
        (self.leave_out_file if is_file else self.leave_out)(reason, name)
        self.other_fields.setdefault(f"left out {{}} ({reason})", {}).update(dict.fromkeys(fields))

    def add(self, words: str, name: str) -> None:
        """Count one file or document. words: the event, such as 'left out {} (binary)', with {} in place of the count."""
        self.counts[words] = self.counts.get(words, 0) + 1
        named = self.names.setdefault(words, [])
        if len(named) < NAMED_AT_MOST:
            named.append(printable(name))

    def copy(self) -> Findings:
        names = {words: list(named) for words, named in self.names.items()}
        fields = {words: dict(named) for words, named in self.other_fields.items()}
        return Findings(names, dict(self.counts), Counter(self.binary_endings), fields, self.n_file_left_out)

    def lines(self, key: str = "data") -> list[str]:
        """One line for each kind of event. key: the source's key, used in the advice to set data.field."""
        lines = []
        for words, count in self.counts.items():
            line = f"{words.format(f'{count:,}')}: {', '.join(self.names[words])}{', …' * (count > NAMED_AT_MOST)}"
            if fields := [printable(name) for name in self.other_fields.get(words, {})]:
                shown = ", ".join(fields[:FIELDS_NAMED_AT_MOST]) + ", …" * (len(fields) > FIELDS_NAMED_AT_MOST)
                line += f" (fields found: {shown}; choose one with {key}.field=…)"
            lines.append(line)
        if self.binary_endings:
            ordered = sorted(self.binary_endings.items(), key=lambda item: (-item[1], item[0]))
            endings = ", ".join(f"{count:,} {printable(ending)}" for ending, count in ordered)
            lines.append(f"left out {self.binary_endings.total():,} (binary): {endings}")
        return lines
