"""Which key a query may see: one predicate on absolute positions.

T queries, S keys. Keys stand at 0 .. S-1; query i stands at start + i, where start is S - T unless said otherwise
(bottom-right: the keys that outnumber the queries are cached and came earlier). No mask (None) means all is visible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Mask(ABC):
    @abstractmethod
    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """query_position (T, 1), key_position (S,) -> bool, broadcastable to (..., T, S); True = may be seen."""

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)


@dataclass(frozen=True)
class Causal(Mask):
    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return key_position <= query_position


@dataclass(frozen=True)
class KeyPadding(Mask):
    lengths: Tensor

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return key_position < self.lengths[..., None, None]


@dataclass(frozen=True)
class Both(Mask):
    first: Mask
    second: Mask

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return self.first.visible(query_position, key_position) & self.second.visible(query_position, key_position)


def causal() -> Mask:
    """A query sees keys at its own position and before."""
    return Causal()


def key_padding(lengths: Tensor) -> Mask:
    """Only the first `lengths` keys are real; lengths has the leading shape of the tensors it masks.

    For tensors (B, H, T, D) and one length a batch row: lengths of shape (B, 1).
    """
    return KeyPadding(lengths)


def visible_keys(mask: Mask, n_query: int, n_key: int, start: int | Tensor, device: torch.device) -> Tensor:
    """The mask written out: bool, broadcastable to (..., T, S)."""
    query_position = start + torch.arange(n_query, device=device)
    return mask.visible(query_position[:, None], torch.arange(n_key, device=device))
