"""The documents whose bits per byte are measured: a file of the user, or the run's held-out text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from andrea.checkpoint import Checkpoint
from andrea.config import UserError
from andrea.runtime.files import from_json, lines_of
from andrea.text.corpus import find_held_out
from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Documents:
    """name: for people. texts: one for each document, none of them empty."""

    name: str
    texts: list[str]


def read_documents(text: str | None, checkpoint: Checkpoint, tokenizer: Tokenizer, data_dir: Path) -> Documents:
    """The file `text`: one document, or one for each line of a .jsonl file; if it is None, the run's held-out text.

    Raises UserError if there is no such text.
    """
    if text is not None:
        return Documents(Path(text).name, documents_of_file(Path(text).expanduser()))
    return Documents("the run's held-out text", held_out_documents(checkpoint, tokenizer, data_dir))


def documents_of_file(path: Path) -> list[str]:
    """Raises UserError if the file cannot be read, or holds no text."""
    try:
        content = path.read_bytes().decode("utf-8")
        found = [content] if path.suffix != ".jsonl" else [text_of(line) for line in lines_of(content)]
    except (OSError, ValueError) as error:
        raise UserError(f"text={path} cannot be read as text in UTF-8 ({error}); name another file") from error
    found = [each for each in found if each]
    if not found:
        raise UserError(f"text={path} holds no text; name another file")
    return found


def text_of(line: str) -> str:
    """The document in a line of a .jsonl file. Raises ValueError."""
    record = from_json(line)
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError('a line is not a record with a "text"')
    return record["text"]


def held_out_documents(checkpoint: Checkpoint, tokenizer: Tokenizer, data_dir: Path) -> list[str]:
    """The documents of the run's held-out text. Raises UserError if it is not prepared in data_dir, or has several sources."""
    state = checkpoint.state
    kind, fingerprint = (state["config"].get("data") or {}).get("kind"), state.get("data")
    known = isinstance(kind, str) and re.fullmatch("[a-z_]+", kind) and fingerprint
    stream = find_held_out(data_dir, fingerprint, kind) if known else None
    if stream is None:
        raise UserError(
            f"the held-out text of {checkpoint.path} is not in data_dir={data_dir}, or has several sources; name a file with "
            f"text=…, or the folder of prepared texts with data_dir=…"
        )
    ids = np.asarray(stream[:], dtype=np.int64)
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text))
    texts = [tokenizer.decode(part[part != tokenizer.end_of_text].tolist()) for part in parts]
    return [text for text in texts if text]
