"""Batches as a pure function of (seed, global sample index).

One integer is therefore enough to resume a run, and ranks need not communicate. T = sequence_length. A stream of N
tokens is cut into ceil((N-1)/T) windows of T tokens; the targets of a window are the same tokens shifted by one. An
epoch contains every window of every source once. Each epoch has its own order of the windows and, from the second on, of
the documents from which they are cut, so that windows begin at other places when a text is read again.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from andrea.text.chat import ChatTokenizer, ConversationWindows
from andrea.text.corpus import PreparedSource
from andrea.text.shards import IGNORED_TARGET, ReorderedStream, TextWindows, TokenStream, Windows, document_begins

BLOCK = 1024  # in each block of this many samples the sources have exactly their shares, rounded to 1/BLOCK
ROUNDS = 8  # rounds of the Feistel network


class Loader:
    """Training batches from one source or a mixture. The loader stores no position, so many readers can share it.

    end_of_text: the token that begins each document, to shuffle whole documents in each epoch after the first; None: the
    documents keep their order.

    Without weights, an epoch is all windows of all sources. With weights, each block of BLOCK samples contains the
    sources in proportion to their shares, and each source has its own epochs. Sources with weight None divide the rest
    in proportion to their sizes.
    """

    def __init__(
        self, sources: Sequence[PreparedSource], sequence_length: int, seed: int, end_of_text: int | None = None
    ) -> None:
        self.in_order = [windows_of(source.train, sequence_length, source.chat, source.pairs) for source in sources]
        self.sequence_length, self.seed, self.end_of_text = sequence_length, seed, end_of_text
        self.begins: dict[int, np.ndarray] = {}  # source -> the first token of each document, once it is needed
        self.reordered: dict[int, tuple[int, TextWindows]] = {}  # source -> the epoch read last, and its windows
        self.windows = np.array([len(windows) for windows in self.in_order])
        self.tokens_per_epoch = sum(windows.n_token for windows in self.in_order)
        chats = [windows for windows in self.in_order if isinstance(windows, ConversationWindows)]
        held_out = [ConversationWindows(s.val, sequence_length, s.chat, s.pairs) for s in sources if s.chat is not None]
        longer = [*(windows.describe() for windows in chats), *(windows.describe("held-out ") for windows in held_out)]
        self.lines = [line for line in longer if line]  # for the terminal
        weighted = len(sources) > 1 and any(source.weight is not None for source in sources)
        self.slots = slots_of(shares([source.weight for source in sources], self.windows)) if weighted else None

    def batch(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, (count, T) int64 each, of samples first_sample … first_sample + count - 1."""
        places = zip(*self.locate(np.arange(first_sample, first_sample + count)), strict=True)
        chosen = ((self.windows_in(epoch, source), window) for source, window, epoch in places)
        return read_windows(chosen, count, self.sequence_length)

    def count_targets(self, first_sample: int, count: int) -> int:
        """The number of targets in samples first_sample … first_sample + count - 1. No token is read."""
        which, window, _ = self.locate(np.arange(first_sample, first_sample + count))
        return sum(windows.count_targets(window[which == source]) for source, windows in enumerate(self.in_order))

    def sample_seeds(self, first_sample: int, count: int) -> Tensor:
        """(count,) int64 from 0 to 2^30 - 1: a random number for each sample, from which the model derives its dropout."""
        key = np.frombuffer(hashlib.sha512(f"{self.seed} dropout".encode()).digest(), dtype="<u8")[0]
        samples = np.arange(first_sample, first_sample + count).astype(np.uint64)
        return torch.from_numpy((mix(mix(samples) + key) >> np.uint64(34)).astype(np.int64))

    def source_shares(self) -> np.ndarray:
        """(sources,) float64: each source's share of the samples, in the order of `sources`; sums to 1."""
        if self.slots is None:
            return self.windows / self.windows.sum()
        return np.bincount(self.slots, minlength=len(self.windows)) / BLOCK

    def windows_in(self, epoch: int, source: int) -> Windows:
        """The windows of a source in an epoch, which reads the documents of a text in an order of its own.

        Conversations stay in their windows: these are read in another order, and no window begins inside one.
        """
        in_order = self.in_order[source]
        if epoch == 0 or self.end_of_text is None or not isinstance(in_order, TextWindows):
            return in_order
        if source not in self.begins:
            self.begins[source] = document_begins(in_order.stream, self.end_of_text)
        if source not in self.reordered or self.reordered[source][0] != epoch:
            n = len(self.begins[source])
            order = permute(np.arange(n), n, f"{self.seed} documents of source {source} epoch {epoch}")
            stream = ReorderedStream(in_order.stream, self.begins[source], order)
            self.reordered[source] = epoch, TextWindows(stream, self.sequence_length)
        return self.reordered[source][1]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Global sample indices (count,) -> each sample's source, window within the source, and epoch; (count,) each."""
        if self.slots is None:
            ends = np.cumsum(self.windows)
            window = self.shuffled(samples, int(ends[-1]), "all")
            which = np.searchsorted(ends, window, side="right")
            return which, window - (ends - self.windows)[which], samples // ends[-1]
        which, nth = self.interleave(samples)
        window = np.empty_like(nth)
        for source in np.unique(which):
            here = which == source
            window[here] = self.shuffled(nth[here], int(self.windows[source]), f"source {source}")
        return which, window, nth // self.windows[which]

    def shuffled(self, samples: np.ndarray, size: int, purpose: str) -> np.ndarray:
        """The window (count,) of each sample. An epoch is `size` consecutive samples, with all `size` windows permuted."""
        window = np.empty_like(samples)
        epochs = samples // size
        for epoch in np.unique(epochs):
            here = epochs == epoch
            window[here] = permute(samples[here] % size, size, f"{self.seed} {purpose} epoch {epoch}")
        return window

    def interleave(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each sample: its source (count,), and the number of earlier samples from the same source (count,)."""
        which, nth = np.empty_like(samples), np.empty_like(samples)
        blocks = samples // BLOCK
        quota = np.bincount(self.slots, minlength=len(self.windows))
        for block in np.unique(blocks):
            here = blocks == block
            order = self.slots[permute(np.arange(BLOCK), BLOCK, f"{self.seed} block {block}")]
            before = np.empty_like(order)
            for source in range(len(quota)):
                mine = order == source
                before[mine] = np.arange(quota[source])
            position = samples[here] % BLOCK
            which[here] = order[position]
            nth[here] = block * quota[order[position]] + before[position]
        return which, nth


def shares(weights: Sequence[float | None], sizes: np.ndarray) -> np.ndarray:
    """Shares (sources,) that sum to 1. Sources without a weight divide the rest in proportion to their sizes."""
    share = np.array([weight or 0.0 for weight in weights], dtype=np.float64)
    unset = np.array([weight is None for weight in weights])
    if unset.any():
        share[unset] = max(0.0, 1.0 - share.sum()) * sizes[unset] / sizes[unset].sum()
    return share / share.sum()


def slots_of(share: np.ndarray) -> np.ndarray:
    """The source of each sample in a block before shuffling, (BLOCK,), by largest remainders; each source has some."""
    exact = share * BLOCK
    quota = np.floor(exact).astype(np.int64)
    quota[np.argsort(quota - exact, kind="stable")[: BLOCK - quota.sum()]] += 1
    while not quota.all():
        quota[np.argmax(quota)] -= 1
        quota[np.argmin(quota)] += 1
    return np.repeat(np.arange(len(share)), quota)


def permute(index: np.ndarray, size: int, key: str) -> np.ndarray:
    """Apply to `index` the permutation of 0 … size-1 that `key` selects, without a table of the permutation.

    The permutation is a balanced Feistel network (Luby and Rackoff 1988) on an even number of bits. It is applied again
    to each result that is not below `size` (cycle walking: Black and Rogaway 2002). The arithmetic is uint64, so that
    every machine and version gives the same order.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    digest = hashlib.sha512(key.encode()).digest()
    keys = np.frombuffer(digest, dtype="<u8")[:ROUNDS]

    def once(value: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right + round_key) & mask)
        return (left << half) | right

    value = once(index.astype(np.uint64))
    while (beyond := value >= size).any():
        value[beyond] = once(value[beyond])
    return value.astype(np.int64)


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014): every bit of the result depends on every bit of `value`."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def read_windows(chosen: Iterable[tuple[Windows, int]], count: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (count, T) int64 each, of windows. What a window leaves free has token 0 and IGNORED_TARGET."""
    tokens = np.zeros((count, sequence_length), np.int64)
    targets = np.full((count, sequence_length), IGNORED_TARGET, np.int64)
    for row, (windows, window) in enumerate(chosen):
        read = windows.read(int(window))
        tokens[row, : len(read[0])], targets[row, : len(read[1])] = read
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def windows_of(stream: TokenStream, sequence_length: int, chat: ChatTokenizer | None, pairs: bool) -> Windows:
    """The windows of a stream of text or, with the tokenizer of its conversations, of these; or of pairs of them."""
    if chat is None:
        return TextWindows(stream, sequence_length)
    return ConversationWindows(stream, sequence_length, chat, pairs)


def validation_batches(
    stream: TokenStream,
    sequence_length: int,
    batch: int,
    most_tokens: int | None = None,
    part: int = 0,
    parts: int = 1,
    chat: ChatTokenizer | None = None,
    pairs: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets (batch, T) of all windows in order. Each token of text but the first is a target exactly once.

    Rows beyond the last window have the target IGNORED_TARGET.
    most_tokens: use only the first windows that cover this many tokens.
    part, parts: yield every `parts`-th batch, beginning with batch `part`. All parts have the same number of batches.
    chat: the tokenizer, if the stream holds conversations. pairs: of `PreparedSource`.
    """
    windows = windows_of(stream, sequence_length, chat, pairs)
    n_window = len(windows)
    if most_tokens is not None:
        n_window = min(n_window, -(-most_tokens // sequence_length))
    rounds = -(-n_window // (batch * parts))
    for first in range(part * batch, rounds * batch * parts, batch * parts):
        chosen = range(first, min(first + batch, n_window))
        yield read_windows(((windows, window) for window in chosen), batch, sequence_length)
