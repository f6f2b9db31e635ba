"""Speculative decoding by prompt lookup: text repeats itself, and checking a token is cheaper than generating it.

When the last few tokens stood in the text before, the tokens that followed them are likely to follow again (Saxena
2023, "Prompt Lookup Decoding"). The engine reads these tokens, the lookahead, in one pass of the model, and keeps them
as far as the model chooses the same ones.
"""

from __future__ import annotations

LONGEST_RUN = 3  # tokens that must occur again; the longest run that did so decides, down to a single token


class PromptLookup:
    """One growing text, and for each of its runs of at most LONGEST_RUN tokens the place that followed it last."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}  # run -> index of the token after its latest occurrence
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        place = len(self.tokens)
        for size in range(1, min(LONGEST_RUN, place) + 1):
            self.follows[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)

    def lookahead(self, most: int) -> list[int]:
        """The `most` tokens that followed the longest run at the text's end when it occurred last; [] if none did.

        Where they reach the end of the text, the lookahead itself continues it.
        """
        for size in range(min(LONGEST_RUN, len(self.tokens)), 0, -1):
            place = self.follows.get(tuple(self.tokens[-size:]))
            if place is not None:
                lookahead = self.tokens[place : place + most]
                while len(lookahead) < most:
                    lookahead.append(lookahead[place + len(lookahead) - len(self.tokens)])
                return lookahead
        return []
