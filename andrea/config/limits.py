"""Limits of single values: ranges, and the form of paths, folder names and devices. schema.py attaches them to types.

Each limit is called with a key and its value, and raises UserError if the value is not allowed. `parse` calls it after
converting the value to its type, so a limit on `int | None` never sees None.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# Sanity limits. Larger values are mistakes, and would make arithmetic, torch or the system fail with obscure errors.
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 1e30
LONGEST_NAME_BYTES = 200  # of a folder's name: disks take 255, and we append endings
LONGEST_PATH_BYTES = 2048
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # characters that a terminal obeys
LONGEST_PART_BYTES = 255  # of a path's part, between two slashes


class UserError(ValueError):
    """The user's input or configuration is wrong. Shown as one line with exit code 2, never with a traceback."""


class Text(str):
    """Type of a key whose value is taken from the command line byte for byte: a prompt, a path, a name."""


class PathText(Text):
    """Type of a key that names a file or a folder: taken byte for byte, and rejected if no disk could hold the name."""


class DottedPath(Text):
    """Type of a key that may name a user's own class: my_module.MyClass. runtime/own_parts.py imports the class."""


def is_dotted_path(value: str) -> bool:
    """Whether `value` consists of at least two identifiers, joined by dots."""
    parts = value.split(".")
    return len(parts) > 1 and len(value) <= LONGEST_NAME_BYTES and all(part.isidentifier() for part in parts)


@dataclass(frozen=True)
class Positive:
    """Greater than 0."""

    def __call__(self, key: str, value: float) -> None:
        if not 0 < value <= LARGEST_NUMBER:
            raise UserError(f"{key}={value} must be greater than 0 and at most {LARGEST_NUMBER:g}")


@dataclass(frozen=True)
class AtLeast:
    least: float

    def __call__(self, key: str, value: float) -> None:
        if not self.least <= value <= LARGEST_NUMBER:
            raise UserError(f"{key}={value} must be at least {self.least} and at most {LARGEST_NUMBER:g}")


@dataclass(frozen=True)
class Between:
    """From `low` to `high`, both included; with `upper_open`, `high` is excluded."""

    low: float
    high: float
    upper_open: bool = False

    def __call__(self, key: str, value: float) -> None:
        if not (self.low <= value < self.high if self.upper_open else self.low <= value <= self.high):
            excluded = ", the upper end excluded" if self.upper_open else ""
            raise UserError(f"{key}={value} must be from {self.low} to {self.high}{excluded}")


def device_name(key: str, value: str) -> None:
    kind, _, index = value.partition(":")
    is_index = index.isascii() and index.isdigit() and len(index) <= 4
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and not is_index) or (kind == "auto" and index):
        raise UserError(f"{key}={value} is not a device; allowed: auto, cpu, cuda, cuda:0, mps")


def folder_name(key: str, value: str) -> None:
    """A name for one folder, not a path."""
    if (
        value in ("", ".", "..")
        or "/" in value
        or CONTROL.search(value)
        or not can_be_path(value)
        or len(os.fsencode(value)) > LONGEST_NAME_BYTES
    ):
        raise UserError(
            f"{key}={value!r} is not a folder name: a name has at most {LONGEST_NAME_BYTES} bytes, no '/' and no control "
            f"character, and is not '.' or '..'; set the folder of all runs with runs_dir=…"
        )


def can_be_path(value: str) -> bool:
    """Whether a disk can hold a file of this name: no NUL, encodable as bytes, not too long."""
    try:
        parts = os.fsencode(value).split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return (
        "\0" not in value
        and max(map(len, parts)) <= LONGEST_PART_BYTES
        and sum(map(len, parts)) + len(parts) <= LONGEST_PATH_BYTES
    )


def readable_path(key: str, value: str) -> str:
    """`value`, if it can name a file or a folder. Raises UserError."""
    if not can_be_path(value):
        raise UserError(
            f"{key}={value[:80]!r} is not a valid path: it must not contain NUL, a name may have at most "
            f"{LONGEST_PART_BYTES} bytes, and the whole path at most {LONGEST_PATH_BYTES}"
        )
    if value.startswith("~") and os.path.expanduser(value) == value:
        user = value[1:].partition("/")[0]
        raise UserError(f"{key}={value}: this machine has no user {user!r}; write ./{value} for a file of that name")
    return value
