"""Masks: which keys a query may see, as a predicate on absolute positions.

T queries, S keys. The keys stand at positions 0 .. S-1, and query i at position start + i. By default start = S - T:
the first S - T keys come from the cache and precede every query. Without a mask (None) every query sees every key.

A mask of your own must define only `visible`. With the masks in this file, alone or combined by `&`, the keys that a
query sees form an interval. Neither end of the interval decreases from one query to the next. `interval` returns the
interval, and the fused kernel skips all keys outside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[Tensor, Tensor]  # (first, stop): keys first .. stop-1 are visible; int64, broadcastable to (..., T)


class Mask(ABC):
    """Base class of masks. Under `one & other` a query sees the keys that both masks let it see.

    n_leading: number of leading dimensions of the mask's own tensors: 0, or the number that the query has.
    """

    n_leading = 0

    @abstractmethod
    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """query_position (T, 1), key_position (S,) -> bool, broadcastable to (..., T, S); True = visible."""

    def interval(self, query_position: Tensor, n_key: int) -> Interval | None:
        """For each query at query_position (T,), the interval of keys that it sees. None if the mask may leave gaps."""
        return None

    @property
    def is_interval(self) -> bool:
        """Whether `interval` returns an interval."""
        return type(self).interval is not Mask.interval

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own position and before."""

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return key_position <= query_position

    def interval(self, query_position: Tensor, n_key: int) -> Interval:
        return torch.zeros_like(query_position), query_position + 1


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees `width` keys: the key at its own position and the width - 1 keys before, none after it.

    Raises ValueError if the width is less than 1.
    """

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(
                f"sliding_window({self.width}): the window includes the query's own position, so the width is at least 1"
            )

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return (key_position <= query_position) & (key_position > query_position - self.width)

    def interval(self, query_position: Tensor, n_key: int) -> Interval:
        return query_position + 1 - self.width, query_position + 1


@dataclass(frozen=True)
class KeyPadding(Mask):
    """A query sees the first `lengths` keys; the others are padding.

    lengths: an integer tensor that broadcasts to the leading shape of the query. If the query is (B, H, T, d), lengths
    of shape (B, 1) give each sequence one length.
    """

    lengths: Tensor

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return key_position < self.lengths[..., None, None]

    @property
    def n_leading(self) -> int:
        return self.lengths.ndim

    def interval(self, query_position: Tensor, n_key: int) -> Interval:
        stop = self.lengths[..., None].expand(*self.lengths.shape, len(query_position))
        return torch.zeros_like(stop), stop


@dataclass(frozen=True)
class PackedDocuments(Mask):
    first: Tensor  # (..., S): first position of the document that each position belongs to
    stop: Tensor  # (..., S): the position after the document's last one

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        first, stop = self.interval(query_position[..., 0], len(key_position))
        return (first[..., None] <= key_position) & (key_position < stop[..., None])

    @property
    def n_leading(self) -> int:
        return self.first.ndim - 1

    def interval(self, query_position: Tensor, n_key: int) -> Interval:
        if self.first.shape[-1] != n_key:
            raise ValueError(
                f"packed_documents was made for {self.first.shape[-1]} positions, but there are {n_key} keys"
            )
        known = query_position.clamp(0, n_key - 1)
        before, after = query_position < 0, query_position >= n_key  # queries outside belong to no document
        first = self.first[..., known].masked_fill(before, 0).masked_fill(after, n_key)
        return first, self.stop[..., known].masked_fill(before, 0)


@dataclass(frozen=True)
class Both(Mask):
    one: Mask
    other: Mask

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return self.one.visible(query_position, key_position) & self.other.visible(query_position, key_position)

    def interval(self, query_position: Tensor, n_key: int) -> Interval | None:
        one, other = self.one.interval(query_position, n_key), self.other.interval(query_position, n_key)
        if one is None or other is None:
            return None
        return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])

    @property
    def n_leading(self) -> int:
        return max(self.one.n_leading, self.other.n_leading)

    @property
    def is_interval(self) -> bool:
        return self.one.is_interval and self.other.is_interval


causal, sliding_window, key_padding = Causal, SlidingWindow, KeyPadding  # the names by which masks are made


def packed_documents(documents: Tensor) -> Mask:
    """A query sees the keys of its own document. documents (..., S): the number of the document at each position.

    Consecutive equal numbers form one document. If the query is (B, H, T, d), documents must be (B, 1, S).
    `documents_of` computes the numbers from tokens.
    """
    position = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    begins = documents != documents.roll(1, -1)
    begins[..., :1] = True
    first = torch.where(begins, position, 0).cummax(-1).values
    following = torch.where(begins, position, documents.shape[-1]).roll(-1, -1)
    following[..., -1] = documents.shape[-1]
    stop = following.flip(-1).cummin(-1).values.flip(-1)
    return PackedDocuments(first, stop)


def documents_of(tokens: Tensor, end_of_text: int) -> Tensor:
    """Number the documents in tokens (..., S): the result (..., S) has each token's document number.

    Every token end_of_text begins a new document.
    """
    return (tokens == end_of_text).cumsum(-1)


def places_in_documents(tokens: Tensor, end_of_text: int) -> Tensor:
    """The place of each token in its document, (..., S): 0 for the first, which is end_of_text or the row's first token."""
    position = torch.arange(tokens.shape[-1], device=tokens.device)
    return position - torch.where(tokens == end_of_text, position, 0).cummax(-1).values


def positions(n_query: int, start: int | Tensor, device: torch.device) -> Tensor:
    """Positions (..., T) of the queries among the keys. start: an int, or a tensor (..., 1) with one number per sequence."""
    return start + torch.arange(n_query, device=device)


def visible_keys(mask: Mask, n_query: int, n_key: int, start: int | Tensor, device: torch.device) -> Tensor:
    """The full mask: bool, broadcastable to (..., T, S); True = visible."""
    return mask.visible(positions(n_query, start, device)[..., None], torch.arange(n_key, device=device))


def visible_interval(
    mask: Mask | None, n_query: int, n_key: int, start: int | Tensor, device: torch.device
) -> Interval | None:
    """(first, stop), broadcastable to (..., T): query i sees keys first[i] .. stop[i]-1. None if the mask may leave gaps."""
    position = positions(n_query, start, device)
    if mask is None:
        return torch.zeros_like(position), torch.full_like(position, n_key)
    interval = mask.interval(position, n_key)
    return None if interval is None else (interval[0].clamp(0, n_key), interval[1].clamp(0, n_key))
