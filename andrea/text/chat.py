"""Conversations as tokens: special tokens for the turns, what is learned of them, and windows of whole conversations.

A conversation is written as

    <|endoftext|> <|user|> content <|end|> <|assistant|> content <|end|> …

with a turn <|system|> in front if there is one. The four special tokens follow the V tokens of any tokenizer. They have no
bytes, and no text is encoded as one of them: "<|user|>" in a message is ordinary text. Only the assistant's tokens are
learned: its content and the <|end|> that follows. T = sequence_length.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from andrea.config import UserError
from andrea.text.shards import IGNORED_TARGET, TokenStream, Windows, document_begins, token_type
from andrea.text.tokenizer import Tokenizer

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)
END = "<|end|>"
# A conversation as text, for other programs: in Jinja, as they expect it.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = (*(f"<|{role}|>" for role in ROLES), END)


@dataclass(frozen=True)
class Turn:
    """One message of a conversation. role: one of ROLES."""

    role: str
    content: str


@final
class ChatTokenizer(Tokenizer):
    """A tokenizer with the tokens of SPECIAL at its end: their ids are base.n_vocab, base.n_vocab + 1, …"""

    def __init__(self, base: Tokenizer) -> None:
        assert not isinstance(base, ChatTokenizer), "the special tokens are added once"
        self.base, self.kind, self.end_of_text = base, base.kind, base.end_of_text
        self.special = {name: base.n_vocab + place for place, name in enumerate(SPECIAL)}
        self.n_vocab = base.n_vocab + len(SPECIAL)
        self.end, self.assistant = self.special[END], self.role_token(ASSISTANT)
        self.ends = (*base.ends, self.end)
        digest = hashlib.sha256(" ".join((base.identity, *SPECIAL)).encode()).hexdigest()
        self.identity = f"{base.kind}-{self.n_vocab}-{digest[:8]}"

    def role_token(self, role: str) -> int:
        return self.special[f"<|{role}|>"]

    def encode_array(self, text: str) -> np.ndarray:
        return self.base.encode_array(text).astype(token_type(self.n_vocab))

    def token_bytes(self) -> list[bytes]:
        return [*self.base.token_bytes(), *[b""] * len(SPECIAL)]

    def save(self, folder: Path) -> None:
        self.base.save(folder)
        super().save(folder)  # this description instead of the base's, which it holds

    def description(self) -> dict[str, Any]:
        return super().description() | {"special": list(SPECIAL), "base": self.base.description()}


def for_chat(tokenizer: Tokenizer) -> ChatTokenizer:
    """The tokenizer itself if it has the special tokens, else one that has them."""
    return tokenizer if isinstance(tokenizer, ChatTokenizer) else ChatTokenizer(tokenizer)


def without_special(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of the text alone."""
    return tokenizer.base if isinstance(tokenizer, ChatTokenizer) else tokenizer


# --------------------------------------------------------------------------------------------- from turns to tokens


def encode_turn(tokenizer: ChatTokenizer, turn: Turn) -> list[int]:
    return [tokenizer.role_token(turn.role), *tokenizer.encode(turn.content), tokenizer.end]


def encode_conversation(tokenizer: ChatTokenizer, turns: Sequence[Turn]) -> list[int]:
    """The tokens of a whole conversation, end_of_text first."""
    return [tokenizer.end_of_text, *(token for turn in turns for token in encode_turn(tokenizer, turn))]


class FittedPrompt(NamedTuple):
    """tokens: after which the assistant answers. n_left_out: turns that do not fit. n_cut: tokens that the last turn loses."""

    tokens: list[int]
    n_left_out: int
    n_cut: int


def fitting_prompt(tokenizer: ChatTokenizer, turns: Sequence[Turn], n_window: int) -> FittedPrompt:
    """The end of a conversation, in `n_window` tokens.

    The oldest turns are left out, whole, and as far as possible the one before which a user's turn follows; a system turn
    in front stays if it fits. Of a last turn that does not fit alone, the first tokens are cut.
    """
    encoded = [encode_turn(tokenizer, turn) for turn in turns]
    n_front = int(bool(turns) and turns[0].role == SYSTEM)
    first = n_front

    def n_token(first: int) -> int:
        return 2 + sum(map(len, encoded[:n_front])) + sum(map(len, encoded[first:]))

    while first < len(turns) - 1 and (
        n_token(first) > n_window or (first > n_front and turns[first].role == ASSISTANT)
    ):
        first += 1
    n_left_out = first - n_front
    if n_front and n_token(first) > n_window and n_token(first) - len(encoded[0]) <= n_window:
        n_front, n_left_out = 0, first  # the last turn fits without the system's
    n_cut = max(0, min(n_token(first) - n_window, len(encoded[-1]) - 3)) if encoded else 0
    if n_cut:
        encoded[-1][1 : 1 + n_cut] = []
    kept = [token for turn in (*encoded[:n_front], *encoded[first:]) for token in turn]
    return FittedPrompt([tokenizer.end_of_text, *kept, tokenizer.assistant], n_left_out, n_cut)


def is_learned(tokens: np.ndarray, tokenizer: ChatTokenizer) -> np.ndarray:
    """(n,) bool: which of the tokens (n,) are the assistant's, its <|end|> included. tokens begin with a conversation.

    A token is the assistant's if the last special token before it is <|assistant|>.
    """
    marks = np.flatnonzero(np.isin(tokens, [*tokenizer.special.values(), tokenizer.end_of_text]))
    last = np.searchsorted(marks, np.arange(len(tokens)), side="left") - 1  # place of the last mark before each token
    before = np.full(len(tokens), -1)
    before[last >= 0] = np.asarray(tokens)[marks[last[last >= 0]]]
    return before == tokenizer.assistant


# ------------------------------------------------------------------------------------------------------------ windows


@final
class ConversationWindows(Windows):
    """Whole conversations, one after the other, in windows of T tokens. The rest of a window has no targets.

    A conversation of more than T + 1 tokens ends with its last turn that fits; one of which no answer fits is left out.
    n_cut, n_left_out: the numbers of such conversations.
    pairs: each two conversations are the chosen and the rejected one of a pair, which stays in one window, whole, or is left
    out. Targets are counted in pairs.
    """

    def __init__(
        self, stream: TokenStream, sequence_length: int, tokenizer: ChatTokenizer, pairs: bool = False
    ) -> None:
        self.stream, self.sequence_length, self.tokenizer = stream, sequence_length, tokenizer
        self.unit = "pairs of conversations" if pairs else "conversations"
        begins = document_begins(stream, tokenizer.end_of_text)[:: 2 if pairs else 1]
        stops = np.append(begins[1:], len(stream))
        self.spans: list[list[tuple[int, int]]] = []  # of each window: where each conversation begins and ends
        self.n_cut = self.n_left_out = 0
        n_left = 0
        for begin, whole in zip(begins.tolist(), stops.tolist(), strict=True):
            stop = self.cut(begin, whole) if not pairs else whole if whole - begin <= sequence_length + 1 else begin
            if stop == begin:
                self.n_left_out += 1
                continue
            self.n_cut += stop < whole
            if stop - begin > n_left:
                self.spans.append([])
                n_left = sequence_length + 1
            self.spans[-1].append((begin, stop))
            n_left -= stop - begin
        if not self.spans:
            raise UserError(
                f"none of {len(begins):,} {self.unit} has an answer that fits; raise model.sequence_length={sequence_length}"
            )
        learned = np.cumsum(np.append(0, is_learned(stream[:], tokenizer)))  # of the tokens before each place
        counts = [len(each) if pairs else sum(int(learned[b] - learned[a]) for a, b in each) for each in self.spans]
        self.n_target = np.array(counts, dtype=np.int64)
        self.n_token = len(self.spans) * sequence_length

    def cut(self, begin: int, stop: int) -> int:
        """The end of the last turn that fits into a window; `begin` if no answer fits."""
        most = self.sequence_length + 1
        if stop - begin <= most:
            return stop
        tokens = self.stream[begin : begin + most]
        ends = np.flatnonzero(tokens == self.tokenizer.end)
        answered = np.flatnonzero(is_learned(tokens, self.tokenizer) & (tokens == self.tokenizer.end))
        return begin + int(ends[-1]) + 1 if len(answered) else begin

    def __len__(self) -> int:
        return len(self.spans)

    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.concatenate([self.stream[begin:stop] for begin, stop in self.spans[window]])
        targets = np.where(is_learned(tokens, self.tokenizer), tokens, IGNORED_TARGET)
        return tokens[:-1], targets[1:]

    def count_targets(self, windows: np.ndarray) -> int:
        return int(self.n_target[windows].sum())

    def describe(self, side: str = "") -> str:
        """What does not fit, as a line for the terminal; empty if everything fits. side: "held-out ", or nothing."""
        longer = self.n_cut + self.n_left_out
        if not longer:
            return ""
        return (
            f"{longer:,} {side}{self.unit} are longer than model.sequence_length={self.sequence_length}: {self.n_cut:,} end with "
            f"their last turn that fits, and {self.n_left_out:,}, of which no answer fits, are left out"
        )
