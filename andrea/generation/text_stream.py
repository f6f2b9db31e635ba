"""Tokens to text, one at a time, without broken characters and without any part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


class TextStream:
    """One sample's text. `push` returns the text that can be shown; `stopped` becomes true at a stop string.

    A token may end inside a character: its bytes wait for the rest of it. Text that may be the beginning of a stop
    string waits as well. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.waiting = ""  # decoded, not shown yet

    def push(self, token: int) -> str:
        return self.release(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """The text that still waits, when no more tokens come."""
        text = self.release(self.decoder.decode(b"", final=True)) + self.waiting
        self.waiting = ""
        return text

    def release(self, new_text: str) -> str:
        """The part of waiting and new text that can be shown now; the rest waits."""
        if self.stopped:
            return ""
        text = self.waiting + new_text
        found = [text.find(stop) for stop in self.stop if stop in text]
        if found:
            self.stopped, self.waiting = True, ""
            return text[: min(found)]
        n_waiting = max((longest_overlap(text, stop) for stop in self.stop), default=0)
        self.waiting = text[len(text) - n_waiting :]
        return text[: len(text) - n_waiting]


def longest_overlap(text: str, stop: str) -> int:
    """The number of characters of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
