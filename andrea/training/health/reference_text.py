"""Measures the repetition and variety of a text, and of held-out text for comparison."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from andrea.text.shards import TokenStream
from andrea.text.tokenizer import Tokenizer
from andrea.training.health.loops import Loop, find_loop, is_value, is_word, split_pieces

FEWEST_PIECES = 16  # a text of fewer words and marks is not judged
WINDOWS = 128  # of held-out text, evenly spaced
VARIETY = ("distinct_1", "distinct_2", "distinct_3", "vocabulary", "compression")  # fields of TextFigures
EXTREME = 0.01  # share of the windows whose variety is below `ReferenceText.lowest`


@dataclass(frozen=True)
class TextFigures:
    """Figures of one text. Low variety and high compression mean repetition."""

    loop: Loop
    distinct_1: float  # different pieces, as a share of all
    distinct_2: float  # different pairs of neighbours, as a share of all
    distinct_3: float  # different triples, as a share of all
    vocabulary: float  # different tokens, as a share of the vocabulary
    compression: float  # compression ratio of zlib on the UTF-8 bytes
    tokens: int
    tabular: bool  # more values than words: a table, too few words to judge their variety

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> TextFigures | None:
        """The figures of `text`, or None if it has fewer than FEWEST_PIECES pieces."""
        pieces = split_pieces(text)
        if len(pieces) < FEWEST_PIECES:
            return None
        written, words = text.encode("utf-8", "replace"), [piece for piece in pieces if is_word(piece)]
        tokens = tokenizer.encode_array(text)
        return cls(
            find_loop(pieces),
            *(distinct(pieces, n) for n in (1, 2, 3)),
            vocabulary=len(np.unique(tokens)) / tokenizer.n_vocab,
            compression=len(written) / len(zlib.compress(written, 9)),
            tokens=len(tokens),
            tabular=sum(map(is_value, words)) > len(words) / 2,
        )


def distinct(pieces: Sequence[str], n: int) -> float:
    """Distinct-n: different n-grams of pieces as a share of all n-grams (Li et al. 2016, arXiv 1510.03055)."""
    runs = list(zip(*(pieces[start:] for start in range(n)), strict=False))
    return len(set(runs)) / len(runs)


@dataclass(frozen=True)
class ReferenceText:
    """Figures of windows of held-out text."""

    windows: tuple[TextFigures, ...]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, streams: Sequence[TokenStream | np.ndarray], tokenizer: Tokenizer, n_token: int) -> ReferenceText:
        """The figures of about WINDOWS windows of n_token tokens. Each stream gives the same number, evenly spaced."""
        each = -(-WINDOWS // len(streams))
        starts = [(stream, np.linspace(0, max(0, len(stream) - n_token), each).astype(int)) for stream in streams]
        texts = [tokenizer.decode(stream[s : s + n_token]) for stream, begins in starts for s in begins]
        figures = (TextFigures.of(text, tokenizer) for text in texts)
        return cls(tuple(window for window in figures if window is not None), tokenizer)

    def lowest(self, name: str) -> float:
        """The figure `name` of a window with little variety: only the share EXTREME of all windows have a lower value.

        For `compression`, a high value means little variety, so only the share EXTREME have a higher value.
        """
        values = [getattr(window, name) for window in self.windows]
        return float(np.quantile(values, 1 - EXTREME if name == "compression" else EXTREME))

    def median(self, name: str) -> float:
        return float(np.median([getattr(window, name) for window in self.windows]))

    def looping_share(self, repetition: float) -> float:
        """Share of the windows, in 0..1, whose loop covers more than `repetition` of the text."""
        return float(np.mean([each.loop.covers(repetition) for each in self.windows]))

    def relative_variety(self, text: TextFigures, name: str) -> float:
        """The figure `name` of `text` divided by `lowest(name)`; for `compression` the inverse of this ratio.

        A result below 1 means that the text is less varied than real text.
        """
        ratio = getattr(text, name) / self.lowest(name)
        return 1 / ratio if name == "compression" else ratio
