"""Numbers as people read them."""

from __future__ import annotations

import pytest

from andrea.training.records.console import format_duration, format_memory, format_number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3_344_064, "3.34M"),
        (465_618_432, "466M"),
        (999_600, "1.00M"),
        (10**9, "1.00B"),
        (2_867_200, "2.87M"),
        (81_920, "81.9k"),
        (999, "999"),
        (0, "0"),
        (61_440, "61.4k"),
        (12, "12"),
        (0.07, "0.07"),
        (1.234e17, "1.23e+17"),
    ],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert format_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (7261, "2 h 01 min"), (90_061, "1 d 1 h")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("n_byte", "text"),
    [(0, "0.00 MiB"), (10_000_000, "9.54 MiB"), (10.4e6, "9.92 MiB"), (5e7, "47.7 MiB"), (2**30 - 1, "1024 MiB"),
     (2**30, "1.00 GiB"), (78 * 2**30, "78.0 GiB")],
)  # fmt: skip
def test_memory_has_three_digits(n_byte: float, text: str) -> None:
    assert format_memory(n_byte) == text
