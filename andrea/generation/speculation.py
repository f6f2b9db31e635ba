"""Guessing what comes next from what was written before: text repeats itself, and a guess is cheaper to check than to make.

Saxena 2023, "Prompt Lookup Decoding": what followed the last few tokens when they stood here before is likely to follow
them again. The engine reads the guess in one pass and keeps what the model would have chosen anyway.
"""

from __future__ import annotations

LONGEST_GRAM = 3  # tokens that must stand here again; tried from the longest to a single one


class Repetition:
    """One growing text and where each of its short runs of tokens was last followed by another."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}  # run -> place of the token after its latest occurrence
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        place = len(self.tokens)
        for size in range(1, min(LONGEST_GRAM, place) + 1):
            self.follows[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest run that stands at the end, the last time it stood before; where
        the text ends, what it would go on with by the same rule.
        """
        for size in range(min(LONGEST_GRAM, len(self.tokens)), 0, -1):
            place = self.follows.get(tuple(self.tokens[-size:]))
            if place is not None:
                guess = self.tokens[place : place + most]
                while len(guess) < most:
                    guess.append(guess[place + len(guess) - len(self.tokens)])
                return guess
        return []
