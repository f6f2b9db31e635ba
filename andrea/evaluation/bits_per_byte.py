"""Bits per byte of documents, each by itself: the only figure that models with different tokenizers have in common.

A document of N tokens is read in windows of at most T = sequence_length tokens, as lm-eval's rolling log-likelihood does:
window k predicts tokens kT … kT + T - 1. Its context is the one token before, and end-of-text before the first window. The
last window predicts the tokens that are left; it still reads T tokens, so its context is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from andrea.evaluation.scoring import Subject


@dataclass(frozen=True)
class BitsPerByte:
    """value: bits per byte of UTF-8. standard_error: of this mean, over the windows."""

    value: float
    standard_error: float | None  # None: one window
    n_document: int
    n_token: int
    n_byte: int


def bits_per_byte(
    subject: Subject, texts: Sequence[str], report: Callable[[int], object] = lambda n: None
) -> BitsPerByte:
    """The texts must hold at least one byte together. report: gets the number of windows that are done after each pass."""
    tokenizer, n_window = subject.tokenizer, subject.gpt.config.sequence_length
    windows = [
        window for text in texts for window in rolling_windows(tokenizer.encode(text), tokenizer.end_of_text, n_window)
    ]
    n_byte_of = tokenizer.byte_lengths()
    bits = [-score.nats / math.log(2) for score in subject.scorer.score(windows, report)]
    n_bytes = [int(n_byte_of[predicted].sum()) for _, predicted in windows]
    value = sum(bits) / sum(n_bytes)
    return BitsPerByte(
        value,
        error_of_ratio(bits, n_bytes, value),
        n_document=len(texts),
        n_token=sum(len(predicted) for _, predicted in windows),
        n_byte=sum(n_bytes),
    )


def rolling_windows(ids: list[int], first: int, n_window: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, predicted) of each window. first: the token in front of the document. Each id is predicted once."""
    stream = [first, *ids]
    for start in range(0, len(ids), n_window):
        stop = min(start + n_window, len(ids))
        read_from = start if start == 0 else stop - n_window  # in `stream`, whose entry i + 1 is ids[i]
        yield stream[read_from : start + 1], stream[start + 1 : stop + 1]


def error_of_ratio(values: Sequence[float], sizes: Sequence[int], ratio: float) -> float | None:
    """The standard error of ratio = sum(values) / sum(sizes), over units that are drawn together (Cochran 1977, eq. 2.39)."""
    n = len(values)
    if n < 2:
        return None
    squares = sum((value - ratio * size) ** 2 for value, size in zip(values, sizes, strict=True))
    return math.sqrt(squares * n / (n - 1)) / sum(sizes)
