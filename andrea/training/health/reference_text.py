"""Figures of a text's repetition and variety, and the same figures of held-out text as the reference."""

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
EXTREME = 0.01  # share of the windows that have less variety than `ReferenceText.lowest` says


@dataclass(frozen=True)
class TextFigures:
    """Figures of one text. Little variety and high compression mean repetition."""

    loop: Loop
    distinct_1: float  # different pieces, as a share of all
    distinct_2: float  # different pairs of neighbours, as a share of all
    distinct_3: float  # different triples, as a share of all
    vocabulary: float  # different tokens, as a share of the vocabulary
    compression: float  # UTF-8 bytes over the bytes that zlib makes of them
    tokens: int
    tabular: bool  # more values than words: a table, whose few words tell nothing of its variety

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> TextFigures | None:
        """None for a text of fewer than FEWEST_PIECES pieces."""
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
    """Different runs of n pieces as a share of all runs of n pieces (distinct-n, Li et al. 2016, arXiv 1510.03055)."""
    runs = list(zip(*(pieces[start:] for start in range(n)), strict=False))
    return len(set(runs)) / len(runs)


@dataclass(frozen=True)
class ReferenceText:
    """Figures of windows of held-out text."""

    windows: tuple[TextFigures, ...]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, streams: Sequence[TokenStream | np.ndarray], tokenizer: Tokenizer, n_token: int) -> ReferenceText:
        """WINDOWS windows of n_token tokens, equally many of each stream and evenly spaced over it."""
        each = -(-WINDOWS // len(streams))
        starts = [(stream, np.linspace(0, max(0, len(stream) - n_token), each).astype(int)) for stream in streams]
        texts = [tokenizer.decode(stream[s : s + n_token]) for stream, begins in starts for s in begins]
        figures = (TextFigures.of(text, tokenizer) for text in texts)
        return cls(tuple(window for window in figures if window is not None), tokenizer)

    def lowest(self, name: str) -> float:
        """The figure below which only EXTREME of the windows lie; for `compression`, above which."""
        values = [getattr(window, name) for window in self.windows]
        return float(np.quantile(values, 1 - EXTREME if name == "compression" else EXTREME))

    def median(self, name: str) -> float:
        return float(np.median([getattr(window, name) for window in self.windows]))

    def looping_share(self, repetition: float) -> float:
        """Share of the windows that are loops, in 0..1."""
        return float(np.mean([each.loop.covers(repetition) for each in self.windows]))

    def relative_variety(self, text: TextFigures, name: str) -> float:
        """A figure of variety over the lowest of the windows: below 1, the text is less varied than real text."""
        ratio = getattr(text, name) / self.lowest(name)
        return 1 / ratio if name == "compression" else ratio
