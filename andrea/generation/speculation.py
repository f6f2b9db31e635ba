"""Speculative decoding by prompt lookup (Saxena 2023, "Prompt Lookup Decoding").

If the last few tokens have occurred earlier in the text, the tokens after that occurrence are likely to follow again.
These tokens are the lookahead. The engine reads the lookahead in one pass of the model, and keeps its tokens up to the
first one that the model does not choose. One pass over several tokens is cheaper than one pass
for each token.
"""

from __future__ import annotations

LONGEST_RUN = 3  # length of the longest sequence that is looked up; if it did not occur before, shorter ones are tried


class PromptLookup:
    """A growing text with an index of all its runs: sequences of at most LONGEST_RUN consecutive tokens."""

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
        """Propose `most` next tokens; [] if the text's last token did not occur before.

        The method looks for the longest run at the text's end that also occurred earlier. The proposal is the tokens
        after the latest earlier occurrence. If these tokens reach the end of the text, the proposal goes on by
        repeating them.
        """
        for size in range(min(LONGEST_RUN, len(self.tokens)), 0, -1):
            place = self.follows.get(tuple(self.tokens[-size:]))
            if place is not None:
                lookahead = self.tokens[place : place + most]
                while len(lookahead) < most:
                    lookahead.append(lookahead[place + len(lookahead) - len(self.tokens)])
                return lookahead
        return []
