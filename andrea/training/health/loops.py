"""Finds the loop that a collapsed model repeats.

A text is split into pieces: words, numbers, and runs of punctuation marks. A run such as `=====`, `'''` or `],` is one
piece, whatever its length, so that a long underline is not mistaken for a loop.
N: number of pieces in a text. P: number of pieces in the unit that a loop repeats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Words and underlines are not longer. A longer piece is a loop without blanks, and is split into its characters.
LONGEST_PIECE_CHARACTERS = 100
PIECE = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s{101,}")
# Values besides numbers. The last five are '', "", [], () and {} with a comma, in the form that `split_pieces` returns.
LITERALS = {"true", "false", "none", "null", "nan", "',", '",', ",[]", "(),", ",{}"}
# A loop of values must cover this share of a text. Below it, the loop may be a table, such as `[0, 0, 0, 0]`.
TABLE_REPETITION = 0.9


@dataclass(frozen=True)
class Loop:
    """The repeated part of a text."""

    share: float  # of the text's pieces, in 0..1
    unit: tuple[str, ...]  # the P pieces that are repeated

    def covers(self, repetition: float) -> bool:
        """Whether the loop's share of the text is above `repetition`; if it is a table, also above TABLE_REPETITION."""
        return self.share > (max(repetition, TABLE_REPETITION) if self.is_table else repetition)

    @property
    def is_table(self) -> bool:
        """Whether the repeated unit consists of values such as numbers. Tables in real text repeat values too."""
        words = [piece for piece in self.unit if is_word(piece)]
        return all(map(is_value, words)) and any(map(is_value, self.unit))

    @property
    def finding(self) -> str:
        """The name of the health finding."""
        if not any(map(is_word, self.unit)):
            return "repeated_punctuation"
        return "repeated_word" if len(self.unit) == 1 else "repeated_phrase"


NO_LOOP = Loop(0.0, ())


def is_word(piece: str) -> bool:
    """Whether the piece is a word or a number, not punctuation."""
    return piece[0].isalnum()


def is_value(piece: str) -> bool:
    """Whether the piece is a number or another literal. Tables and lists hold hundreds of such values."""
    return piece[0].isdigit() or piece in LITERALS


def split_pieces(text: str) -> list[str]:
    """The words of a text in lower case, its numbers, and its runs of punctuation marks.

    A run is reduced to its distinct marks, sorted.
    """
    pieces: list[str] = []
    for piece in PIECE.findall(text):
        if len(piece) > LONGEST_PIECE_CHARACTERS:
            pieces += list(piece)
        elif is_word(piece):
            pieces.append(piece.lower())
        else:
            pieces.append("".join(sorted(set(piece))))
    return pieces


def find_loop(pieces: Sequence[str]) -> Loop:
    """The loop that covers the largest share of the pieces. Its unit has at most N / 3 pieces.

    A stretch of period P is a run of at least P + 2 pieces, each equal to the piece P places before it. A loop with a
    unit of P pieces covers all stretches of period P, and the P pieces before each stretch. A list or a table with
    different entries has no such stretch, even if its rows are similar. A stray word splits a stretch but does not hide
    the loop. The share counts pieces or characters, whichever gives the larger value.
    """
    n_piece = len(pieces)
    number_of = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    numbers = np.array([number_of[piece] for piece in pieces])  # (N,)
    characters = np.array([len(piece) for piece in pieces])  # (N,)
    loops: list[Loop] = []
    for period in range(1, n_piece // 3 + 1):
        same = np.concatenate([[False], numbers[period:] == numbers[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)  # (stretches, 2): first and one past the last
        stretches = edges[edges[:, 1] - edges[:, 0] >= period + 2]
        if len(stretches):
            covered = np.zeros(n_piece, dtype=bool)
            for first, stop in stretches:
                covered[first : stop + period] = True
            longest = stretches[np.argmax(stretches[:, 1] - stretches[:, 0]), 0]
            share = max(covered.mean(), characters[covered].sum() / characters.sum())
            loops.append(Loop(float(share), tuple(pieces[longest : longest + period])))
    most = max((loop.share for loop in loops), default=0.0)
    # A repeated word is also a repeated pair, so choose the shortest unit that covers nearly as much as the best.
    return next((loop for loop in loops if loop.share >= 0.9 * most), NO_LOOP)
