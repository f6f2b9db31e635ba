"""Batches: pure functions of (seed, sample), every token once in each epoch, a mixture in its shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea.text.loader import BLOCK, Loader, permute, shares, slots_of, validation_batches
from andrea.text.shards import IGNORED_TARGET, TextWindows, TokenStream, document_begins


@dataclass(frozen=True)
class Made:
    name: str
    weight: float | None
    train: TokenStream
    chat: None = None
    pairs: bool = False


def made(start: int, count: int, weight: float | None = None) -> Made:
    """A source whose tokens are start, start + 1, …"""
    return Made(f"from {start}", weight, TokenStream([np.arange(start, start + count, dtype=np.uint16)]))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_permute_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_permute_is_stable_and_keyed() -> None:
    """Runs resume on other machines and with other versions, so the order must be this one for good."""
    assert permute(np.arange(11), 11, "key").tolist() == permute(np.arange(11)[::-1], 11, "key")[::-1].tolist()
    assert permute(np.arange(101), 101, "a").tolist() != permute(np.arange(101), 101, "b").tolist()
    assert permute(np.arange(7), 7, "1337 all epoch 0").tolist() == ORDER


ORDER = [3, 2, 1, 0, 6, 5, 4]


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 97), length=st.integers(1, 13), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_token_is_a_target_once_in_each_epoch(tokens: int, length: int, seed: int, epoch: int) -> None:
    loader = Loader([made(0, tokens)], length, seed)
    windows = len(loader.in_order[0])
    _, targets = loader.batch(epoch * windows, windows)
    assert sorted(targets[targets != IGNORED_TARGET].tolist()) == list(range(1, tokens))
    assert loader.tokens_per_epoch == tokens - 1


def test_targets_follow_tokens() -> None:
    tokens, targets = Loader([made(100, 30)], 7, seed=3).batch(0, 11)
    assert tokens.shape == targets.shape == (11, 7) and tokens.dtype == targets.dtype == torch.int64
    counted = targets != IGNORED_TARGET
    assert torch.equal(targets[counted], tokens[counted] + 1)


@pytest.mark.parametrize("weights", [(None, None), (0.7, None), (0.2, 0.8)])
def test_samples_are_a_pure_function_of_their_index(weights: tuple[float | None, float | None]) -> None:
    sources = [made(0, 211, weights[0]), made(500, 97, weights[1])]
    whole = Loader(sources, 5, seed=1).batch(0, 60)
    parts = [Loader(sources, 5, seed=1).batch(first, 20) for first in (0, 20, 40)]
    assert torch.equal(whole[0], torch.cat([tokens for tokens, _ in parts]))
    assert not torch.equal(whole[0], Loader(sources, 5, seed=2).batch(0, 60)[0])
    assert not torch.equal(whole[0], Loader(sources, 5, seed=1).batch(60, 60)[0])


def test_a_mixture_without_weights_has_all_tokens_once_in_each_epoch() -> None:
    loader = Loader([made(0, 31), made(100, 57), made(200, 2)], 5, seed=4)
    windows = 6 + 12 + 1
    targets = loader.batch(windows, windows)[1]
    expected = [*range(1, 31), *range(101, 157), 201]
    assert sorted(targets[targets != IGNORED_TARGET].tolist()) == expected and loader.tokens_per_epoch == len(expected)


def test_a_weighted_mixture_keeps_its_shares_and_each_source_its_epochs() -> None:
    sources = [made(0, 41, 0.75), made(1000, 5001, 0.25)]
    tokens, targets = Loader(sources, 5, seed=4).batch(0, BLOCK)
    first = tokens[:, 0] < 1000
    assert int(first.sum()) == BLOCK * 3 // 4
    three_epochs = targets[first][: 8 * 3]  # of the first source, which has eight windows
    assert sorted(three_epochs.flatten().tolist()) == sorted([*range(1, 41)] * 3)
    beyond = Loader(sources, 5, seed=4).batch(BLOCK, BLOCK)[0]
    assert not torch.equal(beyond, tokens) and int((beyond[:, 0] < 1000).sum()) == BLOCK * 3 // 4
    second = torch.cat([tokens[~first], beyond[beyond[:, 0] >= 1000]])[:, 0]
    assert len(second.unique()) == len(second)  # 512 of 1000 windows: none twice


def test_source_shares_are_those_of_the_samples() -> None:
    sources = [made(0, 31), made(100, 57), made(200, 2)]
    assert Loader(sources, 5, seed=4).source_shares() == pytest.approx([6 / 19, 12 / 19, 1 / 19])
    weighted = Loader([made(0, 41, 0.75), made(1000, 5001, 0.25)], 5, seed=4)
    assert weighted.source_shares() == pytest.approx([0.75, 0.25])
    first = weighted.batch(0, BLOCK)[0][:, 0] < 1000
    assert weighted.source_shares()[0] == first.double().mean()


def test_shares() -> None:
    sizes = np.array([10, 30, 60])
    assert shares([None, None, None], sizes) == pytest.approx([0.1, 0.3, 0.6])
    assert shares([0.5, None, None], sizes) == pytest.approx([0.5, 0.5 / 3, 1 / 3])
    assert shares([1.0, 2.0, 1.0], sizes) == pytest.approx([0.25, 0.5, 0.25])


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=17))
def test_a_block_has_every_source_and_no_other_size(weights: list[float]) -> None:
    share = np.array(weights) / sum(weights)
    quota = np.bincount(slots_of(share), minlength=len(share))
    assert quota.sum() == BLOCK and quota.min() >= 1
    assert np.all(np.abs(quota - share * BLOCK) <= len(share) + 1)


# ------------------------------------------------------------------------------------------------- whole documents

END = 65_535


def documents(name: str, lengths: list[int], weight: float | None = None, first: int = 0) -> Made:
    """A source of documents: each is END and then its other tokens, which count on from `first` through the whole source."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
    tokens[np.cumsum([0, *lengths[:-1]])] = END
    middle = len(tokens) // 2  # in two shards
    return Made(name, weight, TokenStream([tokens[:middle], tokens[middle:]]))


def read_epoch(loader: Loader, epoch: int) -> np.ndarray:
    """The tokens of one source in the order in which the epoch has them: its windows put in order."""
    n = int(loader.windows[0])
    which = loader.locate(np.arange(epoch * n, (epoch + 1) * n))[1]
    tokens, targets = (rows.numpy()[np.argsort(which)].reshape(-1) for rows in loader.batch(epoch * n, n))
    return np.concatenate([tokens[:1], targets[targets != IGNORED_TARGET]])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=12), length=st.integers(1, 13), epoch=st.integers(0, 5)
)
def test_each_epoch_reads_every_document_whole(lengths: list[int], length: int, epoch: int) -> None:
    lengths = [max(2, lengths[0]), *lengths[1:]]
    loader = Loader([documents("one", lengths)], length, seed=1, end_of_text=END)
    read, written = read_epoch(loader, epoch), loader.in_order[0].stream[:]
    pieces = [np.split(tokens, np.flatnonzero(tokens == END)[1:]) for tokens in (read, written)]
    found, expected = (sorted(map(tuple, piece)) for piece in pieces)
    assert found == expected and len(found) == len(lengths)
    if epoch == 0 or len(lengths) == 1:
        assert read.tolist() == written.tolist()
    assert loader.count_targets(epoch * int(loader.windows[0]), int(loader.windows[0])) == len(written) - 1


def test_documents_change_places_in_each_epoch_after_the_first() -> None:
    """Runs resume on other machines and with other versions, so the order must be this one for good."""
    source = documents("one", [5, 3, 8, 2, 6, 4, 7])
    loader = Loader([source], 4, seed=1337, end_of_text=END)
    begins = document_begins(source.train, END).tolist()
    orders = []
    for epoch in range(4):
        read = read_epoch(loader, epoch)
        places = np.flatnonzero(read == END)
        orders.append([begins.index(int(read[place + 1]) - 1) for place in places])
    assert orders == DOCUMENTS
    kept = Loader([source], 4, seed=1337)
    assert all(read_epoch(kept, epoch).tolist() == source.train[:].tolist() for epoch in range(4))


DOCUMENTS = [[0, 1, 2, 3, 4, 5, 6], [1, 0, 4, 6, 2, 3, 5], [1, 5, 2, 6, 4, 3, 0], [1, 3, 5, 2, 0, 6, 4]]


@pytest.mark.parametrize("weights", [(None, None), (0.7, None)])
def test_shuffled_documents_are_a_pure_function_of_the_index(weights: tuple[float | None, float | None]) -> None:
    """A resumed run, or another rank, begins to read anywhere. Each source of a weighted mixture has its own epochs."""
    sources = [documents("a", [9, 4, 12, 3, 7, 5], weights[0]), documents("b", [30, 17, 8], weights[1], first=500)]
    whole = Loader(sources, 5, seed=1, end_of_text=END)
    tokens, targets = whole.batch(0, 120)
    for first in (90, 0, 30, 60):
        for loader in (whole, Loader(sources, 5, seed=1, end_of_text=END)):
            part = loader.batch(first, 30)
            assert torch.equal(part[0], tokens[first : first + 30]) and torch.equal(
                part[1], targets[first : first + 30]
            )
    kept = Loader(sources, 5, seed=1).batch(0, 120)
    which, _, epoch = whole.locate(np.arange(120))
    assert torch.equal(tokens[epoch == 0], kept[0][epoch == 0])
    for source in (0, 1):
        later = (which == source) & (epoch > 0)
        assert later.any() and not torch.equal(tokens[later], kept[0][later])
    assert (epoch[which == 0].max() != epoch[which == 1].max()) == (weights[0] is not None)


def test_what_precedes_the_first_document_is_kept_and_long_streams_are_searched_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = np.array([7, 8, END, 1, 2, END, END, 5], dtype=np.uint16)
    for at_once in (1, 3, 100):
        monkeypatch.setattr("andrea.text.shards.READ_TOKENS", at_once)
        assert document_begins(TokenStream([tokens]), END).tolist() == [0, 2, 5, 6]
        assert document_begins(TokenStream([tokens]), 9).tolist() == [0]
    loader = Loader([Made("cut", None, TokenStream([tokens]))], 3, seed=1, end_of_text=END)
    for epoch in range(5):
        assert sorted(read_epoch(loader, epoch).tolist()) == sorted(tokens.tolist())


# ------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("tokens", [2, 6, 7, 30, 31, 32])
def test_validation_scores_every_token_once_in_order(tokens: int) -> None:
    batches = list(validation_batches(made(0, tokens).train, sequence_length=5, batch=3))
    assert all(part.shape == (3, 5) for pair in batches for part in pair)
    targets = torch.cat([targets.flatten() for _, targets in batches])
    assert targets[targets != IGNORED_TARGET].tolist() == list(range(1, tokens))


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 97), batch=st.integers(1, 5), parts=st.integers(1, 4), most=st.integers(1, 120))
def test_parts_of_validation_have_equally_many_batches_and_score_the_same(
    tokens: int, batch: int, parts: int, most: int
) -> None:
    stream = made(0, tokens).train
    of_parts = [list(validation_batches(stream, 5, batch, most, part, parts)) for part in range(parts)]
    assert len({len(batches) for batches in of_parts}) == 1
    scored = torch.cat([targets.flatten() for batches in of_parts for _, targets in batches])
    windows = min(len(TextWindows(stream, 5)), -(-most // 5))  # as many as hold `most` tokens, whatever the batch
    assert sorted(scored[scored != IGNORED_TARGET].tolist()) == list(range(1, min(tokens, 5 * windows + 1)))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(2, 97), min_size=1, max_size=3), length=st.integers(1, 13), first=st.integers(0, 50))
def test_targets_are_counted_without_reading(sizes: list[int], length: int, first: int) -> None:
    weight = 0.2 if len(sizes) > 1 else None
    loader = Loader([made(0, size, weight) for size in sizes], length, seed=1)
    assert loader.count_targets(first, 7) == (loader.batch(first, 7)[1] != IGNORED_TARGET).sum()
