"""The text on which a proof compares two programs: of the user, the run's held-out text, or a module of Python's."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from andrea.config import UserError
from andrea.interop.settings import Trained
from andrea.text.corpus import held_out_of_run
from andrea.text.sources import texts_at

FEWEST_CHARACTERS = 1000


@dataclass(frozen=True)
class ComparedText:
    """name: for people. ids (n,) int64: its tokens, with end-of-text in front. content: its characters."""

    name: str
    ids: np.ndarray
    content: str


def compared_text(trained: Trained, text: Path | None, data_dir: Path, n_token: int) -> ComparedText:
    """The first n_token tokens of the file `text`; if it is None, of the run's held-out text, or else of a module of Python's."""
    tokenizer = trained.tokenizer
    if text is None and (stream := held_out_of_run(trained.checkpoint.state, data_dir)) is not None:
        held_out = np.asarray(stream[:n_token], dtype=np.int64)
        return ComparedText("the run's held-out text", held_out, tokenizer.decode(held_out.tolist()))
    name = text.name if text else f"{Path(argparse.__file__).name} of Python's library"
    content = read_text(text)
    ids = np.array([tokenizer.end_of_text, *tokenizer.encode(content)], dtype=np.int64)[:n_token]
    return ComparedText(name, ids, content)


@functools.cache  # it is read once, and once is said what is left out
def read_text(text: Path | None) -> str:
    """The content of the file or folder, as training reads it, or of a module of Python's standard library.

    Raises UserError if it is unusable.
    """
    path = text or Path(argparse.__file__)
    content = "\n".join(texts_at(path, "text", None, print if text else lambda line: None))
    if len(content) < FEWEST_CHARACTERS:
        raise UserError(
            f"text={path} has {len(content)} characters, too few to compare on; name a file with {FEWEST_CHARACTERS} or more"
        )
    return content
