"""Small texts and shards, and their corpus, for the tests of preparing and of reading what is prepared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from andrea.config import DataConfig, TokenizerConfig
from andrea.text.corpus import VERIFIED, Corpus, open_corpus
from andrea.text.shards import ShardWriter

BYTE, BPE = TokenizerConfig("byte", None, None), TokenizerConfig("bpe", 300, None)


def quiet(line: str) -> None:
    assert "\n" not in line


def text_config(path: Path) -> DataConfig:
    return DataConfig("text", str(path), {})


def contents(folder: Path) -> dict[str, bytes]:
    """File name -> content of a prepared folder, without verified.json, which holds times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != VERIFIED}


def write_shard(path: Path, tokens: list[int]) -> None:
    writer = ShardWriter(path)
    writer.append(np.array(tokens, dtype=np.uint16))
    writer.close()


def small_notes(folder: Path, count: int = 3) -> Path:
    folder.mkdir()
    for n in range(count):
        (folder / f"{n}.txt").write_text("".join(f"line {i} of note {n}\n" for i in range(40)))
    return folder


def shards_corpus(tmp_path: Path, tokenizer: TokenizerConfig = BYTE) -> Corpus:
    return open_corpus(DataConfig("shards", str(tmp_path / "shards"), {}), tokenizer, tmp_path / "data", quiet)
