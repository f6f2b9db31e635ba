"""The documents whose bits per byte are measured: a file of the user, or the run's held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from andrea.checkpoint import Checkpoint
from andrea.config import UserError
from andrea.text.corpus import held_out_of_run
from andrea.text.sources import texts_at
from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Documents:
    """name: for people. texts: one for each document, none of them empty."""

    name: str
    texts: list[str]


def read_documents(
    text: str | None, field: str | None, checkpoint: Checkpoint, tokenizer: Tokenizer, data_dir: Path
) -> Documents:
    """The documents of the file or folder `text`, as training reads them; if it is None, the run's held-out text.

    field: of records; None: as in training. Raises UserError if there is no such text.
    """
    if text is not None:
        return Documents(Path(text).name, texts_at(Path(text).expanduser(), "text", field, print))
    if field is not None:
        raise UserError(f"field={field} chooses a field of the records of a text; name the text with text=…")
    return Documents("the run's held-out text", held_out_documents(checkpoint, tokenizer, data_dir))


def held_out_documents(checkpoint: Checkpoint, tokenizer: Tokenizer, data_dir: Path) -> list[str]:
    """The documents of the run's held-out text. Raises UserError if it is not prepared in data_dir, or has several sources."""
    stream = held_out_of_run(checkpoint.state, data_dir)
    if stream is None:
        raise UserError(
            f"the held-out text of {checkpoint.path} is not in data_dir={data_dir}, or has several sources; name a file with "
            f"text=…, or the folder of prepared texts with data_dir=…"
        )
    ids = np.asarray(stream[:], dtype=np.int64)
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text))
    texts = [tokenizer.decode(part[part != tokenizer.end_of_text].tolist()) for part in parts]
    return [text for text in texts if text]
