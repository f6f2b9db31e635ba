"""Convert tokens to text, one token at a time. Incomplete characters and parts of a stop string are never shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


class TextStream:
    """One sample's text. `push` returns the text that can be shown; `stopped` becomes true at a stop string.

    A token may end inside a character. The bytes of an incomplete character are held back, and so is text that may be
    the beginning of a stop string. Invalid UTF-8 becomes U+FFFD. n_skipped: bytes at the beginning that are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), n_skipped: int = 0) -> None:
        self.tokenizer = tokenizer
        self.n_skipped = n_skipped
        self.stop = tuple(stop)
        self.stopped = False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.waiting = ""  # decoded, not shown yet

    def push(self, token: int) -> str:
        """Add one token; return the text that can now be shown."""
        new = self.tokenizer.decode_bytes([token])
        shown, self.n_skipped = new[self.n_skipped :], max(0, self.n_skipped - len(new))
        return self.release(self.decoder.decode(shown))

    def finish(self) -> str:
        """Return the text that is still held back. Call this method after the last token."""
        text = self.release(self.decoder.decode(b"", final=True)) + self.waiting
        self.waiting = ""
        return text

    def release(self, new_text: str) -> str:
        """The part of the held-back text and `new_text` that can be shown now. The rest is held back."""
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
    """The length of the longest suffix of `text` that is a prefix of `stop`, but shorter than `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
