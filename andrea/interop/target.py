"""A format that models are exported to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from andrea.model.gpt import GPT


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


class Target(ABC):
    """One model in one format and type of numbers.

    what: the class or architecture that the model becomes. why: a sentence. package: of the program that proves it.
    share, least: the tolerance of the proof, as a share of the largest logit, and at least so much.
    replaced: patterns of files in a repository that an earlier upload may have left, and that would be loaded in place of these.
    """

    what: str
    why: str
    package: str
    share: float
    least: float = 0.0
    replaced: tuple[str, ...] = ()

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the files to an existing folder. Raises OSError, and UserError for what the format cannot hold."""

    @abstractmethod
    def rounded_gpt(self) -> GPT:
        """Our model in fp32, with the weights as the files hold them."""

    @abstractmethod
    def open(self, folder: Path) -> OtherProgram:
        """Load the files by the other program. Raises ImportError if its package is missing."""

    @abstractmethod
    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        """Commands that write text with the files in `folder`, or in the repository `hub` (OWNER/NAME): Markdown.

        prompt: of the text.
        """
