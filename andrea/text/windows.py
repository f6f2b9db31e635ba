"""Windows of T tokens with their targets, cut from a stream of tokens. T = sequence_length.

`TextWindows` cuts running text; `ConversationWindows` (chat.py) keeps conversations whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import numpy as np

from andrea.text.shards import TokenStream, in_blocks

IGNORED_TARGET = -100  # where nothing is to be predicted; torch's default ignore_index


class ReorderedStream:
    """A token stream with its documents in another order: `len(stream)`, and `stream[start:stop]` as int64 (stop - start,).

    Nothing is copied: documents are read where they are.
    """

    def __init__(self, stream: TokenStream, begins: np.ndarray, order: np.ndarray) -> None:
        """begins (documents,): the first token of each document. order (documents,): the document to read at each place."""
        self.stream, self.begins = stream, begins[order]
        self.ends = np.concatenate([[0], np.cumsum(np.diff(begins, append=len(stream))[order])])

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1, "a token stream supports only slices with step 1"
        place, parts = int(np.searchsorted(self.ends, start, side="right")) - 1, [np.empty(0, dtype=np.int64)]
        while start < stop:
            end = min(stop, int(self.ends[place + 1]))
            shift = int(self.begins[place] - self.ends[place])
            parts.append(self.stream[start + shift : end + shift])
            start, place = end, place + 1
        return np.concatenate(parts)


def document_begins(stream: TokenStream, end_of_text: int) -> np.ndarray:
    """(documents,) int64: the first token of each document. What precedes the first end_of_text counts as a document."""
    n_read, found = 0, [np.zeros(1, np.int64)]
    for tokens in in_blocks(stream):
        found.append(n_read + np.flatnonzero(tokens == end_of_text))
        n_read += len(tokens)
    return np.unique(np.concatenate(found))


class Windows(ABC):
    """The windows of one stream: `len(windows)`. n_token: tokens that are read in an epoch."""

    n_token: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets (n,) int64, n ≤ T, of a window. The target of a token is the token after it, or IGNORED_TARGET."""

    @abstractmethod
    def count_targets(self, windows: np.ndarray) -> int:
        """The number of targets in these windows. No token is read."""


@final
class TextWindows(Windows):
    """A stream of N tokens in ceil((N-1)/T) windows. Every token but the first is a target once."""

    def __init__(self, stream: TokenStream | ReorderedStream, sequence_length: int) -> None:
        self.stream, self.sequence_length = stream, sequence_length
        self.n_token = max(0, len(stream) - 1)

    def __len__(self) -> int:
        return -(-self.n_token // self.sequence_length)

    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        start = int(window) * self.sequence_length
        read = self.stream[start : start + self.sequence_length + 1]
        return read[:-1], read[1:]

    def count_targets(self, windows: np.ndarray) -> int:
        return int(np.clip(self.n_token - windows * self.sequence_length, 0, self.sequence_length).sum())
