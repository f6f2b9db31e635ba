"""The text on which a proof compares two programs: a file of the user, the run's held-out text, or a module of Python's."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from andrea.config import UserError
from andrea.interop.settings import Trained
from andrea.text.corpus import find_held_out

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
    if text is None and (held_out := held_out_of(trained, data_dir, n_token)) is not None:
        return ComparedText("the run's held-out text", held_out, tokenizer.decode(held_out.tolist()))
    name = text.name if text else f"{Path(argparse.__file__).name} of Python's library"
    content = read_text(text)
    ids = np.array([tokenizer.end_of_text, *tokenizer.encode(content)], dtype=np.int64)[:n_token]
    return ComparedText(name, ids, content)


def held_out_of(trained: Trained, data_dir: Path, n_token: int) -> np.ndarray | None:
    """The first held-out tokens of the run's text, (n,) int64; None if this text is not prepared in data_dir."""
    state = trained.checkpoint.state
    kind, fingerprint = (state["config"].get("data") or {}).get("kind"), state.get("data")
    if not (isinstance(kind, str) and re.fullmatch("[a-z_]+", kind)) or not fingerprint:
        return None
    stream = find_held_out(data_dir, fingerprint, kind)
    return None if stream is None else np.asarray(stream[:n_token], dtype=np.int64)


def read_text(text: Path | None) -> str:
    """The content of the file, or of a module of Python's standard library. Raises UserError if it is unusable."""
    path = text or Path(argparse.__file__)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"text={path} cannot be read as text in UTF-8 ({error}); name another file") from error
    if len(content) < FEWEST_CHARACTERS:
        raise UserError(
            f"text={path} has {len(content)} characters, too few to compare on; name a file with {FEWEST_CHARACTERS} or more"
        )
    return content
