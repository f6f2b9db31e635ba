"""Log-probabilities of continuations: batched, and with the keys and values of a context that several of them share.

A continuation of K tokens is predicted from the context in front of it. N tokens of a row, T = sequence_length, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.model.gpt import GPT
from andrea.runtime.shared_cores import MACHINE

LARGEST_LOGITS = 1 << 25  # numbers that are computed at once: 128 MiB
FEWEST_SHARED = 32  # tokens of a context that are worth a cache


@dataclass(frozen=True)
class Score:
    """nats: the log-probability of a continuation, at most 0. is_greedy: whether each of its tokens was the likeliest."""

    nats: float
    is_greedy: bool


@dataclass(frozen=True)
class Row:
    """What the model reads for a request. index: of the request. tokens: context and continuation, at most T + 1.

    n_context: the tokens of the context that are left; at least one.
    """

    index: int
    tokens: list[int]
    n_context: int

    @property
    def context(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.n_context])

    @property
    def continuation(self) -> list[int]:
        return self.tokens[self.n_context :]


class Scorer:
    """Scores continuations with a model in fp32. batch_size: the sequences that are read in one pass.

    n_cut: the number of requests so far whose context lost its first tokens, because it did not fit the model's window.
    """

    def __init__(self, gpt: GPT, batch_size: int) -> None:
        self.gpt, self.batch_size, self.n_cut = gpt, batch_size, 0
        self.device = gpt.embedding.weight.device

    @torch.inference_mode()
    def score(
        self, requests: Sequence[tuple[list[int], list[int]]], report: Callable[[int], object] = lambda n: None
    ) -> list[Score]:
        """The score of each (context, continuation), in their order. A context needs at least one token.

        If both together do not fit the model's window, the context loses its first tokens. report: gets the number of
        requests that are done after each pass. Raises UserError if a continuation alone does not fit.
        """
        scores: dict[int, Score] = {}
        by_context = defaultdict(list)
        for index, (context, continuation) in enumerate(requests):
            row = self.row(index, context, continuation)
            by_context[row.context].append(row)
        alone: list[Row] = []
        with MACHINE.taken():
            for context, rows in by_context.items():
                if len(rows) == 1 or len(context) < FEWEST_SHARED:
                    alone += rows
                    continue
                for first in range(0, len(rows), self.batch_size):
                    self.keep(scores, rows[first : first + self.batch_size], self.hidden_after_shared, report)
            alone.sort(key=lambda row: len(row.tokens), reverse=True)  # rows of one pass have similar lengths
            for first in range(0, len(alone), self.batch_size):
                self.keep(scores, alone[first : first + self.batch_size], self.hidden_of, report)
        return [scores[index] for index in range(len(requests))]

    def row(self, index: int, context: list[int], continuation: list[int]) -> Row:
        n_window = self.gpt.config.sequence_length
        if not continuation or len(continuation) > n_window:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, and the model predicts from 1 to model.sequence_length="
                f"{n_window} of them at once; choose another task"
            )
        tokens = [*context, *continuation]
        self.n_cut += len(tokens) > n_window + 1
        tokens = tokens[-(n_window + 1) :]
        return Row(index, tokens, len(tokens) - len(continuation))

    def keep(
        self,
        scores: dict[int, Score],
        rows: list[Row],
        hidden_of: Callable[[list[Row]], list[Tensor]],
        report: Callable[[int], object],
    ) -> None:
        """Score the rows of one pass. hidden_of: gives (K, d_model) for each row: the vectors that predict its continuation."""
        MACHINE.pass_on()
        for row, hidden in zip(rows, hidden_of(rows), strict=True):
            scores[row.index] = self.score_of(hidden, torch.tensor(row.continuation, device=self.device))
        report(len(rows))

    def hidden_of(self, rows: list[Row]) -> list[Tensor]:
        """Reads the rows as a batch. Padding follows each row, where no token of the row sees it."""
        hidden = self.gpt(padded([row.tokens[:-1] for row in rows]).to(self.device))
        return [each[row.n_context - 1 : len(row.tokens) - 1] for each, row in zip(hidden, rows, strict=True)]

    def hidden_after_shared(self, rows: list[Row]) -> list[Tensor]:
        """As `hidden_of`, for rows with the same context, which is read once."""
        context = list(rows[0].context)
        new = padded([[context[-1], *row.continuation[:-1]] for row in rows]).to(self.device)
        n_before = len(context) - 1
        cache = self.gpt.make_cache(len(rows), n_before + new.shape[1])
        self.gpt(torch.tensor([context[:-1]], device=self.device), cache.of_sequence(0))
        cache.copy_sequence(0, n_before)
        cache.set_lengths([n_before] * len(rows))
        return [each[: len(row.continuation)] for each, row in zip(self.gpt(new, cache), rows, strict=True)]

    def score_of(self, hidden: Tensor, continuation: Tensor) -> Score:
        """hidden (K, d_model), continuation (K,)."""
        nats, is_greedy = 0.0, True
        most = max(1, LARGEST_LOGITS // self.gpt.n_vocab)
        for vectors, tokens in zip(hidden.split(most), continuation.split(most), strict=True):
            logits = self.gpt.logits(vectors).float()  # (k, V)
            nats += float(logits.log_softmax(-1).gather(-1, tokens[:, None]).sum(dtype=torch.float64))
            is_greedy = is_greedy and bool((logits.argmax(-1) == tokens).all())
        return Score(nats, is_greedy)


def padded(rows: list[list[int]]) -> Tensor:
    """(B, N) int64; each row is filled up with its last token."""
    width = max(map(len, rows))
    return torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])
