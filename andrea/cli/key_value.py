"""Words of a command line that are not written as key=value."""

from __future__ import annotations

import os
from collections.abc import Iterator

from andrea.config import UserError


def to_key_value(words: list[str], positional: str | None = None) -> list[str]:
    """Every word as key=value: `--key value` and `--key=value` become key=value.

    positional: the key of positional arguments. These are words without '=', and words that name an existing file or
    folder, since a path may contain '='. Raises UserError for an option without a value.
    """
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if positional and os.path.exists(word):
            found.append(f"{positional}={word}")
        elif word.startswith("--"):
            found.append(option(word.removeprefix("--"), rest))
        elif positional and "=" not in word:
            found.append(f"{positional}={word}")
        else:
            found.append(word)
    return found


def option(word: str, rest: Iterator[str]) -> str:
    """An option, given without its dashes, as key=value. If it has no '=', the next word of `rest` is its value."""
    if "=" in word:
        return word
    value = next(rest, None)
    if value is None:
        raise UserError(f"--{word} needs a value; write --{word} VALUE or {word}=VALUE")
    return f"{word}={value}"
