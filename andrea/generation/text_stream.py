"""From tokens to text while they come: no broken characters, and nothing shown that belongs to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


class TextStream:
    """One sample's text. `push` returns what is safe to show; `stopped` turns true at a stop string.

    A token may end inside a character: its bytes wait for the rest. Text that may become a stop string waits too.
    Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.waiting = ""

    def push(self, token: int) -> str:
        return self._release(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """What still waits, when no more tokens come."""
        text = self._release(self.decoder.decode(b"", final=True)) + self.waiting
        self.waiting = ""
        return text

    def _release(self, new_text: str) -> str:
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
    """The length of the longest end of text with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
