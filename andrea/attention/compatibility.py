"""Compatibility functions f(query, key) -> score: how well a key answers a query.

T queries of width d_k, S keys of width d_k, any leading dimensions in front.

A compatibility function says the same thing twice. `scores` is the textbook line, read by people and by the reference
path. `lower` rewrites query and key so that their plain dot product gives those scores, which lets one fused kernel
serve them all; rotary positions are applied to what `lower` returns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor, nn


class Compatibility(nn.Module, ABC):
    """A module, because what a function learns (per head) belongs to it."""

    @abstractmethod
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """query (..., T, d_k), key (..., S, d_k) -> scores (..., T, S)."""

    @abstractmethod
    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query', key' of the same shapes, with query'·key' = scores(query, key)."""


class DotProduct(Compatibility):
    """f(q, k) = q·k (Luong et al. 2015, arXiv 1508.04025, eq. 8, "dot")."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class ScaledDotProduct(Compatibility):
    """f(q, k) = q·k / sqrt(d_k) (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    For independent N(0, 1) entries q·k has variance d_k; divided by sqrt(d_k) it is 1 at every width, and the softmax
    neither saturates nor loses its gradient as d_k grows.
    """

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT / math.sqrt(query.shape[-1])

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query * (1 / math.sqrt(query.shape[-1])), key


COMPATIBILITIES: dict[str, type[Compatibility]] = {"scaled_dot": ScaledDotProduct, "dot": DotProduct}
