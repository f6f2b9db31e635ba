"""Judges samples: text that repeats one loop, and text with far less variety than held-out text."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from andrea.text.shards import TokenStream
from andrea.text.tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------------------------------- loops
# Finds the loop that a collapsed model repeats.
#
# A text is split into pieces: words, numbers, and runs of punctuation marks. A run such as `=====`, `'''` or `],` is one
# piece, whatever its length, so that a long underline is not mistaken for a loop.
# N: number of pieces in a text. P: number of pieces in the unit that a loop repeats.

# Words and underlines are not longer. A longer piece is a loop without blanks, and is split into its characters.
LONGEST_PIECE_CHARACTERS = 100
PIECE = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s{101,}")
# Values besides numbers. The last five are '', "", [], () and {} with a comma, in the form that `split_pieces` returns.
LITERALS = {"true", "false", "none", "null", "nan", "',", '",', ",[]", "(),", ",{}"}
# A loop of values must cover this share of a text. Below it, the loop may be a table, such as `[0, 0, 0, 0]`.
TABLE_REPETITION = 0.9


@dataclass(frozen=True)
class Loop:
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
    """The words of a text in lower case, its numbers, and its runs of punctuation marks, each reduced to its sorted marks."""
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


# ------------------------------------------------------------------------------------------------------- reference text

FEWEST_PIECES = 16  # a text of fewer words and marks is not judged
WINDOWS = 128  # of held-out text, evenly spaced
VARIETY = {
    "distinct_1": "words",
    "distinct_2": "word pairs",
    "distinct_3": "word triples",
    "vocabulary": "tokens",
    "compression": "compressed size",
}  # field of TextFigures -> its name in a message
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
    """The figures of held-out text, made when the first samples are judged.

    n_token: of a window. Each stream gives the same number of windows, WINDOWS together, evenly spaced.
    """

    streams: Sequence[TokenStream | np.ndarray]
    tokenizer: Tokenizer
    n_token: int

    @functools.cached_property
    def windows(self) -> tuple[TextFigures, ...]:
        each = -(-WINDOWS // len(self.streams))
        starts = [
            (stream, np.linspace(0, max(0, len(stream) - self.n_token), each).astype(int)) for stream in self.streams
        ]
        texts = [self.tokenizer.decode(stream[s : s + self.n_token]) for stream, begins in starts for s in begins]
        figures = (TextFigures.of(text, self.tokenizer) for text in texts)
        return tuple(window for window in figures if window is not None)

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
        """The figure `name` of `text` / `lowest(name)`, inverse for `compression`; below 1: less varied than real text."""
        ratio = getattr(text, name) / self.lowest(name)
        return 1 / ratio if name == "compression" else ratio


# ----------------------------------------------------------------------------------------------------------------- text

FAILING_SHARE = 0.5  # of the texts: even a healthy small model writes a loop in one sample of five
REPETITION = 0.4  # a text is a loop if one repeated unit covers more than this share of it
LEAST_VARIETY = 0.5  # of the least varied validation text
SHOWN_UNIT_CHARACTERS = 40  # of a loop's unit, in a message


class Judgement(NamedTuple):
    figures: dict[str, float]  # for the run's records
    findings: dict[str, str]  # finding's name -> message with the figure, the limit and the remedy


def judge_texts(texts: Sequence[str], reference: ReferenceText) -> Judgement:
    """Figures and findings of samples. Empty if fewer than half of the samples are long enough to judge."""
    judged = [figures for text in texts if (figures := TextFigures.of(text, reference.tokenizer)) is not None]
    if not judged or len(judged) < len(texts) / 2 or not reference.windows:
        return Judgement({}, {})
    figures: dict[str, float] = {
        "health/text/judged": len(judged),
        "health/text/loop_share": float(np.mean([each.loop.share for each in judged])),
        "health/text/loop_share_validation": float(np.mean([each.loop.share for each in reference.windows])),
    }
    for name in VARIETY:
        figures[f"health/text/{name}"] = float(np.median([getattr(each, name) for each in judged]))
        figures[f"health/text/{name}_validation"] = reference.median(name)
    return Judgement(figures, find_loops(judged, reference) or find_poor_text(judged, reference))


def find_loops(judged: Sequence[TextFigures], reference: ReferenceText) -> dict[str, str]:
    """The most frequent kind of loop, if the share of samples that loop is at least FAILING_SHARE, and above chance.

    A share r of the held-out windows are loops, so the number of loops in n real texts is binomial. Chance explains at
    most its mean plus three standard deviations: n (r + 3 √(r (1 - r) / n)).
    """
    looping = [each.loop for each in judged if each.loop.covers(REPETITION)]
    real = reference.looping_share(REPETITION)
    chance = real + 3 * (real * (1 - real) / len(judged)) ** 0.5
    if not looping or len(looping) < FAILING_SHARE * len(judged) or len(looping) <= chance * len(judged):
        return {}
    names = [loop.finding for loop in looping]
    name = max(sorted(set(names)), key=names.count)
    worst = max((loop for loop in looping if loop.finding == name), key=lambda loop: loop.share)
    unit = " ".join(worst.unit)
    shown = unit if len(unit) <= SHOWN_UNIT_CHARACTERS else unit[: SHOWN_UNIT_CHARACTERS - 1] + "…"
    return {
        name: f"{len(looping)} of {len(judged)} samples repeat themselves: "
        f"in the worst, {shown!r} makes up {worst.share:.0%} of the text (limit: "
        f"{REPETITION:.0%}). Of the validation texts, {real:.1%} repeat themselves"
    }


def find_poor_text(judged: Sequence[TextFigures], reference: ReferenceText) -> dict[str, str]:
    """Finds samples that do not loop but have far less variety than real text, such as a few words in random order.

    Short samples are left out, because few tokens have little variety. Tables are left out too.
    """
    long = [each for each in judged if each.tokens >= reference.median("tokens") / 2 and not each.tabular]
    rows = [{name: reference.relative_variety(each, name) for name in VARIETY} for each in long]
    poor = [row for row in rows if min(row.values()) < LEAST_VARIETY]
    if not poor or len(poor) < FAILING_SHARE * len(judged):
        return {}
    worst = min(poor, key=lambda row: min(row.values()))
    low = ", ".join(f"{VARIETY[name]} {share:.0%}" for name, share in worst.items() if share < LEAST_VARIETY)
    return {
        "poor_text": f"{len(poor)} of {len(judged)} samples have little "
        f"variety. The worst sample, relative to the least varied validation text: {low} (limit: "
        f"{LEAST_VARIETY:.0%})"
    }
