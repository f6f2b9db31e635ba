"""Prompts to be answered: the conversations of a corpus, each up to an answer of the assistant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from andrea.text.chat import ROLES, ChatTokenizer, Turn
from andrea.text.shards import TokenStream, in_blocks
from andrea.text.windows import IGNORED_TARGET, document_begins


@final
class Prompts:
    """The prompts of a split: each conversation up to an answer of the assistant, and this answer, which is the reference."""

    def __init__(self, streams: Sequence[TokenStream], tokenizer: ChatTokenizer) -> None:
        self.tokenizer, tokens, places, n_before = tokenizer, [], [], 0
        for stream in streams:
            text = np.concatenate(list(in_blocks(stream)))
            asks, ends = (np.flatnonzero(text == each) for each in (tokenizer.assistant, tokenizer.end))
            begins = document_begins(stream, tokenizer.end_of_text)
            first = begins[np.searchsorted(begins, asks, side="right") - 1]
            places.append(n_before + np.stack([first, asks + 1, ends[np.searchsorted(ends, asks)] + 1], 1))
            tokens.append(text)
            n_before += len(text)
        self.tokens, self.places = np.concatenate(tokens), np.concatenate(places)  # (n, 3): begin, answer, end

    def keep(self, kept: np.ndarray) -> None:
        self.places = self.places[kept]

    def lengths(self) -> np.ndarray:
        """(n, 2): tokens of each prompt, and of its reference with the <|end|>."""
        return np.diff(self.places, axis=1)

    def prompt(self, place: int) -> list[int]:
        begin, answer, _ = self.places[place]
        return self.tokens[begin:answer].tolist()

    def words(self, place: int) -> tuple[list[Turn], str]:
        """The turns of a prompt, and the text of its reference."""
        begin, answer, end = self.places[place]
        roles = {self.tokenizer.role_token(role): role for role in ROLES}
        text = self.tokens[begin + 1 : answer - 1]  # without end_of_text and <|assistant|>
        turns = [
            Turn(roles[int(part[0])], self.tokenizer.decode(part[1:].tolist()))
            for part in np.split(text, np.flatnonzero(text == self.tokenizer.end) + 1)[:-1]
        ]
        return turns, self.tokenizer.decode(self.tokens[answer : end - 1].tolist())


def windows_of_answers(
    texts: Sequence[tuple[list[int], list[int], float]], n_token: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and weights (n, T) of texts, as many after each other as fit into a window of T = n_token tokens.

    texts: the tokens of a prompt, those of its answer, and the weight of each of the latter, which alone are targets.
    """
    rows: list[list[tuple[list[int], list[int], float]]] = []
    room = 0
    for prompt, answer, weight in texts:
        if len(prompt) + len(answer) > room:
            rows.append([])
            room = n_token + 1
        rows[-1].append((prompt, answer, weight))
        room -= len(prompt) + len(answer)
    tokens = torch.zeros(len(rows), n_token + 1, dtype=torch.int64)
    targets, weights = torch.full_like(tokens, IGNORED_TARGET), torch.zeros(tokens.shape)
    for row, entries in enumerate(rows):
        end = 0
        for prompt, answer, weight in entries:
            begin, asked, end = end, end + len(prompt), end + len(prompt) + len(answer)
            tokens[row, begin:end] = torch.tensor(prompt + answer)
            targets[row, asked:end], weights[row, asked:end] = tokens[row, asked:end], weight
    return tokens[:, :-1], targets[:, 1:], weights[:, 1:]
