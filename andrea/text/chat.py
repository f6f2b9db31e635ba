"""Conversations as tokens: a tokenizer with tokens for roles, and prompts that fit the model's window.

A conversation is end_of_text, and for each turn the token of its role, its content, and the token of its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from andrea.text.tokenizer import Tokenizer

SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


@dataclass(frozen=True)
class Turn:
    role: str  # system, user or assistant
    content: str


@final
class ChatTokenizer(Tokenizer):
    """A base tokenizer, and after its tokens those of SPECIAL. Text that looks like one of them stays text."""

    def __init__(self, base: Tokenizer) -> None:
        self.base, self.kind, self.end_of_text = base, base.kind, base.end_of_text
        self.special = {name: base.n_vocab + number for number, name in enumerate(SPECIAL)}
        self.n_vocab = base.n_vocab + len(SPECIAL)
        self.identity = f"{base.identity}-chat"

    def encode_array(self, text: str) -> np.ndarray:
        return self.base.encode_array(text)

    def token_bytes(self) -> list[bytes]:
        return [*self.base.token_bytes(), *(b"" for _ in SPECIAL)]


def fitting_prompt(tokenizer: ChatTokenizer, turns: Sequence[Turn], room: int) -> tuple[list[int], int]:
    """The ids of a conversation up to and including <|assistant|>, and the number of the oldest turns that were left out.

    The last turn stays, also if it does not fit `room` tokens.
    """
    special = tokenizer.special
    parts = [[special[f"<|{turn.role}|>"], *tokenizer.encode(turn.content), special["<|end|>"]] for turn in turns]
    n_left_out = 0
    while n_left_out < len(parts) - 1 and sum(map(len, parts[n_left_out:])) + 2 > room:
        n_left_out += 1
    ids = [token for part in parts[n_left_out:] for token in part]
    return [tokenizer.end_of_text, *ids, special["<|assistant|>"]], n_left_out
