"""Reads a folder of text for the tests: its documents, and what is said of it."""

from __future__ import annotations

from pathlib import Path

from andrea.config import SourceConfig
from andrea.text.sources import Source, Split


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def read(path: Path, **selection: object) -> tuple[list[str], list[str]]:
    """The documents of both splits in one list, and what is said about the source."""
    source = Source("s", "text", path, "data.path", SourceConfig("text", **selection))
    said: list[str] = []
    source.check(said.append)
    documents = [document.open().read().decode() for document in source.every_document(source.unread.copy())]
    return documents, [line.removeprefix("s: ") for line in said]


def documents(source: Source, split: Split) -> list[str]:
    """The split's documents as whole texts."""
    texts: list[str] = []
    for piece in source.pieces(split):
        if piece.begins_document:
            texts.append("")
        texts[-1] += piece.text
    return texts
