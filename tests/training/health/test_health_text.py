"""The judgement of text: collapses are named, lists and tables and real text are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea.text.tokenizer import ByteTokenizer
from andrea.training.health.text_quality import Loop, ReferenceText, TextFigures, find_loop, judge_texts, split_pieces

TOKENIZER = ByteTokenizer()
N_TOKEN = 400
words = st.text("abcdefghij", min_size=2, max_size=9)


@pytest.fixture(scope="module")
def real(notes: Path) -> str:
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(notes.iterdir()))


@pytest.fixture(scope="module")
def reference(real: str) -> ReferenceText:
    return ReferenceText([TOKENIZER.encode_array(real)], TOKENIZER, N_TOKEN)


def named(reference: ReferenceText, *texts: str) -> dict[str, str]:
    return judge_texts(texts, reference)[1]


# ----------------------------------------------------------------------------------------------------- by hand


def test_pieces_are_words_numbers_and_runs_of_marks() -> None:
    assert split_pieces("Games, games;\n====== 12 '''''") == ["games", ",", "games", ";", "=", "12", "'"]
    assert split_pieces("a_b == [],") == ["a", "_", "b", "=", ",[]"]
    assert split_pieces("=" * 101) == ["="] * 101 and split_pieces("=" * 100) == ["="]
    assert split_pieces(" " * 101) == [" "] * 101 and split_pieces(" " * 100) == []


def test_a_loop_solved_by_hand() -> None:
    """a b c, then x y four times: eight of eleven pieces, six of which equal the one two before."""
    loop = find_loop(list("abcxyxyxyxy"))
    assert loop.share == pytest.approx(8 / 11) and loop.unit == ("x", "y")
    assert find_loop(list("abcxyxyxdef")).share == 0  # three in a row equal the one two before: too few
    assert find_loop(list("aaaaab")).unit == ("a",)
    assert find_loop([]).share == 0 and find_loop(["a"]).share == 0


def test_of_pieces_and_characters_the_larger_share_counts() -> None:
    assert find_loop(["a", "b", *["region"] * 4]).share == pytest.approx(24 / 26)
    assert find_loop(["abcdef", "ghijkl", *["x"] * 4]).share == pytest.approx(4 / 6)


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=9), st.integers(4, 9), st.lists(words, max_size=6))
def test_what_repeats_is_covered_whatever_comes_before(unit: list[str], times: int, before: list[str]) -> None:
    pieces = before + unit * times
    if len(unit) > len(pieces) // 3:
        return
    loop = find_loop(pieces)
    assert loop.share >= len(unit) * times / len(pieces) * 0.9 - 1e-9
    assert len(loop.unit) <= len(unit)


@given(st.lists(words, min_size=16, max_size=60, unique=True))
def test_different_words_are_no_loop_and_as_distinct_as_can_be(names: list[str]) -> None:
    figures = TextFigures.of(" ".join(names), TOKENIZER)
    assert figures.loop.share == 0 and figures.distinct_1 == figures.distinct_2 == figures.distinct_3 == 1
    letters = {letter for name in names for letter in name} | {" "}
    assert figures.vocabulary == pytest.approx(len(letters) / 257)


def test_figures_of_one_word_repeated_by_hand() -> None:
    figures = TextFigures.of("region " * 50, TOKENIZER)
    assert figures.loop.share == 1
    assert [figures.distinct_1, figures.distinct_2, figures.distinct_3] == [1 / 50, 1 / 49, 1 / 48]
    assert figures.vocabulary == pytest.approx(len(set("region ")) / 257) and figures.compression > 10


# ------------------------------------------------------------------------------------------------- the collapses


@pytest.mark.parametrize("start", [0, N_TOKEN * 2 // 5])
@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("repeated_word", "region " * 99),
        ("repeated_word", "The\n" * 200),
        ("repeated_punctuation", "''''' ''''' '' " * 60),
        ("repeated_punctuation", ", " * 300),
        ("repeated_punctuation", '"' * 500),
        ("repeated_phrase", "games, " * 99),
        ("repeated_phrase", "the end of the line, " * 40),
        ("repeated_phrase", "one two three four five six,\n" * 20),
        ("repeated_phrase", "return self.x\n    " * 30),
        ("repeated_phrase", "0, " * 200),
    ],
)
def test_each_collapse_is_named(name: str, loop: str, start: int, reference: ReferenceText, real: str) -> None:
    text = (real[1000 : 1000 + start] + "\n" + loop)[:N_TOKEN]
    assert set(named(reference, text)) == (
        {name} if loop[0] != "0" or not start else set()
    )  # a table may be half a text


def test_a_stray_word_now_and_then_hides_nothing(reference: ReferenceText) -> None:
    text = " ".join("other" if index % 13 == 7 else "region" for index in range(80))
    assert set(named(reference, text[:N_TOKEN])) == {"repeated_word"}


def test_the_message_has_the_figure_the_threshold_and_the_unit(reference: ReferenceText) -> None:
    message = named(reference, *["games, " * 60] * 3)["repeated_phrase"]
    assert "3 of 3" in message and "100%" in message and "'games ,'" in message and "limit: 40%" in message


def test_some_samples_must_show_it(reference: ReferenceText, real: str) -> None:
    loop, healthy = "region " * 60, real[:N_TOKEN]
    assert not named(reference, loop, healthy, healthy, healthy, healthy)
    assert not named(reference, loop, loop, healthy, healthy, healthy)
    assert set(named(reference, loop, loop, loop, healthy, healthy)) == {"repeated_word"}


def test_a_few_words_in_any_order_are_poor(reference: ReferenceText, real: str) -> None:
    draw = np.random.default_rng(1)
    text = " ".join(draw.choice(["to", "of", "and", "it"], 200))[:N_TOKEN]
    found = named(reference, text)
    assert set(found) == {"poor_text"} and "limit: 50%" in found["poor_text"]
    assert not named(reference, real[: N_TOKEN // 3])  # a text that ended early has fewer tokens


# ------------------------------------------------------------------------------------------- what is legitimate


NUMBERS = np.random.default_rng(2).integers(0, 5000, 200).tolist()
NAMES = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()
LEGITIMATE = {
    "numbers": str(NUMBERS),
    "bits": str([number % 2 for number in NUMBERS]),
    "booleans": str([number % 2 == 0 for number in NUMBERS]),
    "zeros": f"def table(width):\n    cells = {[0] * 50}\n    return {' + '.join(NAMES)}",
    "strings": str(NAMES * 2),
    "empty strings": f"def table(width):\n    cells = {[''] * 40}\n    return {' + '.join(NAMES)}",
    "dictionary": "{" + ", ".join(f"'{name}': 0" for name in NAMES) + "}",
    "assignments": "".join(f"    self.{name} = None\n" for name in NAMES),
    "imports": "".join(f"from {name} import {name}\n" for name in NAMES),
    "markdown table": "| name | value |\n|---|---|\n" + "".join(f"| {name} | 0 |\n" for name in NAMES),
    "underline": f"Title\n{'=' * 79}\n\n{' '.join(NAMES)}.\n\nNext\n{'-' * 79}\n\n{' '.join(reversed(NAMES))}.",
    "ruler": f"{'----+----' * 9}\n{' '.join(NAMES)}\n{'=-' * 39}\n{' '.join(reversed(NAMES))}",
    "indentation": "".join(f"{' ' * 4 * depth}if {name}:\n" for depth, name in enumerate(NAMES)),
    "columns": "".join(f"{name:<60}{number:>12}\n" for name, number in zip(NAMES, NUMBERS, strict=False)),
}


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_lists_and_tables_are_not_named(kind: str, reference: ReferenceText) -> None:
    assert not named(reference, LEGITIMATE[kind][:N_TOKEN])


def test_real_text_is_not_named(reference: ReferenceText, real: str) -> None:
    windows = [real[start : start + N_TOKEN] for start in range(0, len(real) - N_TOKEN, 250)]
    alarms = [found for window in windows if (found := named(reference, window))]
    assert len(windows) > 150 and len(alarms) <= 0.01 * len(windows), alarms


def test_what_validation_text_does_too_is_not_named(real: str) -> None:
    """Where held-out text itself is full of loops (say, logs), a loop in a sample is what was to be learned."""
    looping = ("tick tock, " * 60)[:N_TOKEN]
    reference = ReferenceText([TOKENIZER.encode_array(looping * 5 + real[:2500])], TOKENIZER, N_TOKEN)
    assert 0.3 < reference.looping_share(0.4) < 0.7 and not named(reference, *[looping] * 5)


def test_a_text_too_short_is_not_judged(reference: ReferenceText) -> None:
    assert TextFigures.of("games, games, games", TOKENIZER) is None
    assert judge_texts(["games, games"] * 4, reference) == ({}, {})
    assert judge_texts([], reference) == ({}, {})


def test_each_figure_stands_beside_that_of_validation_text(reference: ReferenceText, real: str) -> None:
    figures, _ = judge_texts([real[:N_TOKEN]], reference)
    names = ("loop_share", "distinct_1", "distinct_2", "distinct_3", "vocabulary", "compression")
    beside = {f"health/text/{name}{of}" for name in names for of in ("", "_validation")}
    assert figures.keys() == beside | {"health/text/judged"}
    assert figures["health/text/compression_validation"] == pytest.approx(
        np.median([window.compression for window in reference.windows])
    )


@pytest.mark.parametrize(
    ("unit", "is_table"),
    [
        (("0", ","), True),
        (("none",), True),
        (("',",), True),  # an empty string and a comma
        (("1", ",[]", "true"), True),
        (("region", "0"), False),
        (("region",), False),
        (("=",), False),  # no value at all
        (("-", "+"), False),
    ],
)
def test_a_loop_of_values_may_be_a_table_and_must_cover_nearly_all(unit: tuple[str, ...], is_table: bool) -> None:
    assert Loop(0.85, unit).is_table == is_table
    assert Loop(0.85, unit).covers(0.6) != is_table
    assert Loop(0.95, unit).covers(0.6) and not Loop(0.95, unit).covers(0.96) and not Loop(0.5, unit).covers(0.6)
