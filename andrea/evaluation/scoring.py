"""Log-probabilities of continuations, and bits per byte of documents.

Continuations are scored in batches, and with the keys and values of a context that several of them share. A continuation of
K tokens is predicted from the context in front of it. N tokens of a row, T = sequence_length, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import open_model
from andrea.config import UserError
from andrea.generation.batching import TokenScore, token_score
from andrea.generation.packed_model import PackedGPT
from andrea.generation.sample_command import make_engine
from andrea.model.gpt import GPT
from andrea.runtime.device import choose_device
from andrea.text.tokenizer import Tokenizer

LARGEST_LOGITS = 1 << 25  # numbers that are computed at once: 128 MiB
FEWEST_SHARED = 32  # tokens of a context that are worth a cache


@dataclass(frozen=True)
class Score:
    """nats: the log-probability of a continuation, at most 0. is_greedy: whether each of its tokens was the likeliest."""

    nats: float
    is_greedy: bool


@dataclass(frozen=True)
class Row:
    """A request, by its index: the context that is left of it, at least one token, and its continuation, at most T + 1 together."""

    index: int
    context: tuple[int, ...]
    continuation: list[int]

    @property
    def read(self) -> list[int]:
        """What the model reads: all tokens but the last, which it predicts."""
        return [*self.context, *self.continuation[:-1]]


Pass = tuple[list[Row], list[Tensor]]  # rows, and for each (K, d_model): the vectors that predict its continuation


class Scorer:
    """Scores continuations with a model in fp32, or with `packed`, the same model with its weights in another precision.

    batch_size: the sequences that are read in one pass.
    n_cut: the number of requests so far whose context lost its first tokens, because it did not fit the model's window.
    """

    def __init__(self, gpt: GPT, batch_size: int, packed: GPT | PackedGPT | None = None) -> None:
        self.gpt, self.model, self.batch_size, self.n_cut = gpt, packed or gpt, batch_size, 0
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
        for context, rows in by_context.items():
            if len(rows) > 1 and len(context) >= FEWEST_SHARED:
                self.keep(scores, self.passes_after_shared(rows), report)
            else:
                alone += rows
        alone.sort(key=lambda row: len(row.read), reverse=True)  # rows of one pass have similar lengths
        self.keep(scores, self.passes(alone), report)
        return [scores[index] for index in range(len(requests))]

    def row(self, index: int, context: list[int], continuation: list[int]) -> Row:
        n_window = self.gpt.config.sequence_length
        if not continuation or len(continuation) > n_window:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, and the model predicts from 1 to model.sequence_length="
                f"{n_window} of them at once; choose another task"
            )
        n_context = n_window + 1 - len(continuation)
        self.n_cut += len(context) > n_context
        return Row(index, tuple(context[-n_context:]), continuation)

    def keep(self, scores: dict[int, Score], passes: Iterator[Pass], report: Callable[[int], object]) -> None:
        """Score the rows of each pass."""
        for rows, hidden in passes:
            for row, vectors in zip(rows, hidden, strict=True):
                scores[row.index] = self.score_of(vectors, torch.tensor(row.continuation, device=self.device))
            report(len(rows))

    def passes(self, rows: list[Row]) -> Iterator[Pass]:
        """Reads the rows in batches. Padding follows each row, where no token of the row sees it."""
        for batch in self.batches(rows):
            hidden = self.model(padded([row.read for row in batch]).to(self.device))
            yield batch, [each[len(row.context) - 1 : len(row.read)] for each, row in zip(hidden, batch, strict=True)]

    def passes_after_shared(self, rows: list[Row]) -> Iterator[Pass]:
        """As `passes`, for rows with the same context, which is read once."""
        context = list(rows[0].context)
        n_before, longest = len(context) - 1, max(len(row.continuation) for row in rows)
        n_sequence = min(len(rows), self.batch_size)
        cache = self.model.make_cache(n_sequence, n_before + longest)
        self.model(torch.tensor([context[:-1]], device=self.device), cache.of_sequence(0))
        cache.copy_sequence(0, n_before)
        for batch in self.batches(rows):
            new = padded([[context[-1], *row.continuation[:-1]] for row in batch])
            new = torch.cat([new, new[:1].expand(n_sequence - len(batch), -1)])  # the last batch may have fewer rows
            cache.set_lengths([n_before] * n_sequence)
            hidden = self.model(new.to(self.device), cache)
            yield batch, [each[: len(row.continuation)] for each, row in zip(hidden, batch, strict=False)]

    def batches(self, rows: list[Row]) -> Iterator[list[Row]]:
        for first in range(0, len(rows), self.batch_size):
            yield rows[first : first + self.batch_size]

    def score_of(self, hidden: Tensor, continuation: Tensor) -> Score:
        """hidden (K, d_model), continuation (K,)."""
        nats, is_greedy = 0.0, True
        most = max(1, LARGEST_LOGITS // self.gpt.n_vocab)
        for vectors, tokens in zip(hidden.split(most), continuation.split(most), strict=True):
            logits = self.model.logits(vectors).float()  # (k, V)
            scores = logits.log_softmax(-1).gather(-1, tokens[:, None])
            nats += float(scores.cpu().sum(dtype=torch.float64))  # MPS has no fp64
            is_greedy = is_greedy and bool((logits.argmax(-1) == tokens).all())
        return Score(nats, is_greedy)


@torch.inference_mode()
def score_tokens(gpt: GPT, ids: list[int], n_likeliest: int) -> list[TokenScore]:
    """The score of each of ids[1:], given those before it. ids: from 1 to sequence_length + 1 of them."""
    if len(ids) == 1:
        return []
    device, scores = gpt.embedding.weight.device, []
    hidden, predicted = gpt(torch.tensor([ids[:-1]], device=device))[0], torch.tensor(ids[1:])
    most = max(1, LARGEST_LOGITS // gpt.n_vocab)
    for vectors, tokens in zip(hidden.split(most), predicted.split(most), strict=True):
        rows = gpt.logits(vectors).float().log_softmax(-1).cpu()  # (k, V)
        scores += [token_score(row, token, n_likeliest) for row, token in zip(rows, tokens.tolist(), strict=True)]
    return scores


def padded(rows: list[list[int]]) -> Tensor:
    """(B, N) int64; each row is filled up with its last token."""
    width = max(map(len, rows))
    return torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])


@dataclass(frozen=True)
class Subject:
    """The judged model: as it is saved, in fp32, and as `scorer` runs it, with weights in `precision`."""

    checkpoint: Checkpoint
    gpt: GPT
    tokenizer: Tokenizer
    scorer: Scorer
    precision: str = "fp32"


def load_subject(
    checkpoint: str | None, runs_dir: str, device: str, batch_size: int, trust: bool, precision: str = "fp32"
) -> Subject:
    """The model of the checkpoint that a user names. Raises UserError or Damaged."""
    found, gpt, tokenizer = open_model(checkpoint, runs_dir, choose_device(device), trust)
    packed = None if precision == "fp32" else make_engine(gpt, tokenizer, precision).model
    return Subject(found, gpt, tokenizer, Scorer(gpt, batch_size, packed), precision)


# -------------------------------------------------------------------------------------------------------- bits per byte
# Bits per byte of documents, each by itself: the only figure that models with different tokenizers have in common.
#
# A document of N tokens is read in windows of at most T = sequence_length tokens, as lm-eval's rolling log-likelihood does:
# window k predicts tokens kT … kT + T - 1. Its context is the one token before, and end-of-text before the first window. The
# last window predicts the tokens that are left; it still reads T tokens, so its context is longer.


@dataclass(frozen=True)
class BitsPerByte:
    """value: bits per byte of UTF-8. standard_error: of this mean, over the windows."""

    value: float
    standard_error: float | None  # None: one window
    n_document: int
    n_token: int
    n_byte: int


def bits_per_byte(subject: Subject, texts: Sequence[str]) -> BitsPerByte:
    """The texts must hold at least one byte together."""
    tokenizer, n_window = subject.tokenizer, subject.gpt.config.sequence_length
    windows = [
        window for text in texts for window in rolling_windows(tokenizer.encode(text), tokenizer.end_of_text, n_window)
    ]
    n_byte_of = tokenizer.byte_lengths()
    bits = [-score.nats / math.log(2) for score in subject.scorer.score(windows)]
    n_bytes = [int(n_byte_of[predicted].sum()) for _, predicted in windows]
    value = sum(bits) / sum(n_bytes)
    return BitsPerByte(
        value,
        error_of_ratio(bits, n_bytes, value),
        n_document=len(texts),
        n_token=sum(len(predicted) for _, predicted in windows),
        n_byte=sum(n_bytes),
    )


def rolling_windows(ids: list[int], first: int, n_window: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, predicted) of each window. first: the token in front of the document. Each id is predicted once."""
    stream = [first, *ids]
    for start in range(0, len(ids), n_window):
        stop = min(start + n_window, len(ids))
        read_from = start if start == 0 else stop - n_window  # in `stream`, whose entry i + 1 is ids[i]
        yield stream[read_from : start + 1], stream[start + 1 : stop + 1]


def error_of_ratio(values: Sequence[float], sizes: Sequence[int], ratio: float) -> float | None:
    """The standard error of ratio = sum(values) / sum(sizes), over units that are drawn together (Cochran 1977, eq. 2.39)."""
    n = len(values)
    if n < 2:
        return None
    squares = sum((value - ratio * size) ** 2 for value, size in zip(values, sizes, strict=True))
    return math.sqrt(squares * n / (n - 1)) / sum(sizes)
