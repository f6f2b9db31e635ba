"""A format that models are exported to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from andrea.interop.program import OtherProgram
from andrea.model.gpt import GPT


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
