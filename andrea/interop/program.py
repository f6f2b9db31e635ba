"""What a proof asks of the other program, which has loaded an exported folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class OtherProgram(ABC):
    """name: of the program, with its version."""

    name: str

    @abstractmethod
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits (T, V) fp32 for T token ids."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with end-of-text in front."""

    @abstractmethod
    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        """At most n_new ids that follow, each the likeliest, generated with the program's own cache."""
