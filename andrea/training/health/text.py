"""Does a text repeat itself as a collapsed model does? Figures of a text, and the same of real text to hold them against.

A text is read as pieces: words and numbers, and runs of marks. A ruler (`=====`), `'''` or `],` is one piece, whatever
its length, so that a list, a table or an underline does not look like a loop because it is drawn with many characters.
N pieces in a text, P pieces in the unit of a loop.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from andrea.config import HealthConfig
from andrea.text.shards import TokenStream
from andrea.text.tokenizer import Tokenizer

# Longer than a line is wide: no word and no ruler, but a loop without blanks, which is read by its characters.
LONGEST_PIECE_CHARACTERS = 100
LEAST_PIECES = 16  # a shorter text is not judged
PIECE = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s{101,}")
# Besides numbers; the last are the marks of '', [], () and {} in a list, which `pieces_of` sorts.
LITERALS = {"true", "false", "none", "null", "nan", "',", '",', ",[]", "(),", ",{}"}
TABLE_LOOP = 0.9  # of a text: a shorter loop of values is a table, as in `[0, 0, 0, 0]`
REFERENCE_WINDOWS = 128  # of held-out text, spread over its length
VARIETY = ("distinct_1", "distinct_2", "distinct_3", "vocabulary", "compression")  # names in TextFigures
UNIT_CHARACTERS = 40  # of a loop's unit, shown in a message


@dataclass(frozen=True)
class Loop:
    """The loop that covers most of a text."""

    share: float  # of the text's pieces, in 0..1
    unit: tuple[str, ...]  # what is repeated: P pieces

    def covers(self, repetition: float) -> bool:
        """Whether it is more than `repetition` of the text; a table of values, nearly all of it."""
        return self.share > (max(repetition, TABLE_LOOP) if self.is_table else repetition)

    @property
    def is_table(self) -> bool:
        """Of values alone: real text holds such loops too."""
        words = [piece for piece in self.unit if piece[0].isalnum()]
        return all(map(is_value, words)) and any(map(is_value, self.unit))

    @property
    def finding(self) -> str:
        if not any(piece[0].isalnum() for piece in self.unit):
            return "repeated_punctuation"
        return "repeated_word" if len(self.unit) == 1 else "repeated_phrase"


NO_LOOP = Loop(0.0, ())


def is_value(piece: str) -> bool:
    """A number or another literal, as tables and lists hold them by the hundred."""
    return piece[0].isdigit() or piece in LITERALS


def pieces_of(text: str) -> list[str]:
    """Words in lower case, numbers, and each run of marks as the different marks in it."""
    pieces: list[str] = []
    for piece in PIECE.findall(text):
        if len(piece) > LONGEST_PIECE_CHARACTERS:
            pieces += list(piece)
        elif piece[0].isalnum():
            pieces.append(piece.lower())
        else:
            pieces.append("".join(sorted(set(piece))))
    return pieces


def find_loop(pieces: Sequence[str]) -> Loop:
    """The loop of at most N / 3 pieces that covers most of them.

    A piece is covered when it lies in a stretch of at least P + 2 pieces that each equal the one P before, or is one of
    those P. A list or a table whose entries differ has no such stretch, however alike its rows are; and a stray word
    ends one stretch of a loop without hiding the others. Of pieces and of their characters, the larger share counts.
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
    # A word repeated is a pair repeated too: the shortest unit that explains nearly as much is the loop's.
    return next((loop for loop in loops if loop.share >= 0.9 * most), NO_LOOP)


@dataclass(frozen=True)
class TextFigures:
    """Of one text. Low variety and high compression mean repetition."""

    loop: Loop
    distinct_1: float  # different pieces, as a share of all
    distinct_2: float  # different pairs of neighbours, as a share of all
    distinct_3: float
    vocabulary: float  # different tokens, as a share of the vocabulary
    compression: float  # bytes before zlib over bytes after
    tokens: int
    tabular: bool  # more values than words: a table, whose few words say nothing

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> TextFigures | None:
        """None: too short to say."""
        pieces = pieces_of(text)
        if len(pieces) < LEAST_PIECES:
            return None
        written, words = text.encode("utf-8", "replace"), [piece for piece in pieces if piece[0].isalnum()]
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
    """Different runs of n pieces as a share of all (Li et al. 2016, arXiv 1510.03055)."""
    runs = list(zip(*(pieces[start:] for start in range(n)), strict=False))
    return len(set(runs)) / len(runs)


@dataclass(frozen=True)
class ReferenceText:
    """What the figures of held-out text are, window by window, and the judgement of samples against them."""

    windows: tuple[TextFigures, ...]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, streams: Sequence[TokenStream | np.ndarray], tokenizer: Tokenizer, n_token: int) -> ReferenceText:
        """REFERENCE_WINDOWS windows of n_token tokens, as many of each stream, spread evenly over it."""
        each = -(-REFERENCE_WINDOWS // len(streams))
        starts = [(stream, np.linspace(0, max(0, len(stream) - n_token), each).astype(int)) for stream in streams]
        texts = [tokenizer.decode(stream[s : s + n_token]) for stream, begins in starts for s in begins]
        figures = (TextFigures.of(text, tokenizer) for text in texts)
        return cls(tuple(window for window in figures if window is not None), tokenizer)

    def poorest(self, name: str) -> float:
        """What a hundredth of the windows do not reach; of `compression`, what a hundredth of them exceed."""
        values = [getattr(window, name) for window in self.windows]
        return float(np.quantile(values, 0.99 if name == "compression" else 0.01))

    def usual(self, name: str) -> float:
        return float(np.median([getattr(window, name) for window in self.windows]))

    def looping_share(self, repetition: float) -> float:
        """How many of the windows are loops, in 0..1."""
        return float(np.mean([each.loop.covers(repetition) for each in self.windows]))

    def judge(self, texts: Sequence[str], config: HealthConfig) -> tuple[dict[str, float], dict[str, str]]:
        """(figures, findings) of the samples; nothing where fewer than half of them are long enough to say."""
        judged = [figures for text in texts if (figures := TextFigures.of(text, self.tokenizer)) is not None]
        if not judged or len(judged) < len(texts) / 2 or not self.windows:
            return {}, {}
        figures: dict[str, float] = {
            "health/text/judged": len(judged),
            "health/text/loop_share": float(np.mean([each.loop.share for each in judged])),
            "health/text/loop_share_validation": float(np.mean([each.loop.share for each in self.windows])),
        }
        for name in VARIETY:
            figures[f"health/text/{name}"] = float(np.median([getattr(each, name) for each in judged]))
            figures[f"health/text/{name}_validation"] = self.usual(name)
        return figures, self.loops(judged, config) or self.poverty(judged, config)

    def loops(self, judged: Sequence[TextFigures], config: HealthConfig) -> dict[str, str]:
        """The collapse that most of the looping samples show, where so many of them loop as real text never would.

        Of n texts as real as the windows, of which a share r loops, more than r + 3 √(r (1 - r) / n) hardly ever do.
        """
        looping = [each.loop for each in judged if each.loop.covers(config.repetition)]
        real = self.looping_share(config.repetition)
        expected = real + 3 * (real * (1 - real) / len(judged)) ** 0.5
        if not looping or len(looping) < config.showing * len(judged) or len(looping) <= expected * len(judged):
            return {}
        names = [loop.finding for loop in looping]
        name = max(sorted(set(names)), key=names.count)
        worst = max((loop for loop in looping if loop.finding == name), key=lambda loop: loop.share)
        unit = " ".join(worst.unit)
        shown = unit if len(unit) <= UNIT_CHARACTERS else unit[: UNIT_CHARACTERS - 1] + "…"
        return {
            name: f"{len(looping)} of {len(judged)} samples are loops, {worst.share:.0%} of one repeats {shown!r} "
            f"(health.repetition={config.repetition:g}), of validation text {real:.1%} are"
        }

    def poverty(self, judged: Sequence[TextFigures], config: HealthConfig) -> dict[str, str]:
        """Text that is no loop, and yet far poorer by some measure than real text ever is: a few words in any order.

        A sample that ended by itself, early, has few different tokens for want of tokens.
        """
        long = [each for each in judged if each.tokens >= self.usual("tokens") / 2 and not each.tabular]
        rows = [{name: self.richness(each, name) for name in VARIETY} for each in long]
        poor = [row for row in rows if min(row.values()) < config.variety]
        if not poor or len(poor) < config.showing * len(judged):
            return {}
        worst = min(poor, key=lambda row: min(row.values()))
        return {
            "poor_text": f"{len(poor)} of {len(judged)} samples are poor, the worst has "
            + ", ".join(f"{name} {share:.0%}" for name, share in worst.items() if share < config.variety)
            + f" of what the poorest validation text has (health.variety={config.variety:g})"
        }

    def richness(self, text: TextFigures, name: str) -> float:
        """One figure of variety, as a share of what a hundredth of the windows do not reach."""
        ratio = getattr(text, name) / self.poorest(name)
        return 1 / ratio if name == "compression" else ratio
