"""Shards: the published layout, streams across files, errors that name the damage."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea.config import UserError
from andrea.text.shards import DataLost, ShardWriter, TokenStream, open_shard, token_type


def write(path: Path, *parts: list[int]) -> Path:
    writer = ShardWriter(path)
    for part in parts:
        writer.append(np.array(part, dtype=np.uint16))
    writer.close()
    return path


def test_layout_is_the_published_one(tmp_path: Path) -> None:
    data = write(tmp_path / "a.bin", [1, 2], [65535]).read_bytes()
    assert len(data) == 1024 + 6
    assert struct.unpack("<3i", data[:12]) == (20240520, 1, 3) and not any(data[12:1024])
    assert struct.unpack("<3H", data[1024:]) == (1, 2, 65535)


@pytest.mark.parametrize(("n_vocab", "kind", "head"), [(65536, "H", (20240520, 1)), (65537, "I", (20240801, 7))])
def test_the_vocabulary_decides_the_width_of_a_token(tmp_path: Path, n_vocab: int, kind: str, head: tuple) -> None:
    """llm.c's layouts for GPT-2 and for Llama 3; both are read back, and in one stream."""
    tokens = [5, n_vocab - 1, 0, n_vocab - 2]
    writer = ShardWriter(tmp_path / "a.bin", n_vocab)
    writer.append(np.array(tokens))
    assert writer.close()[0] == 4
    data = (tmp_path / "a.bin").read_bytes()
    assert struct.unpack("<3i", data[:12]) == (*head, 4) and struct.unpack(f"<4{kind}", data[1024:]) == tuple(tokens)
    shard = open_shard(tmp_path / "a.bin")
    assert shard[1:3].tolist() == tokens[1:3] and shard[0:4].dtype == token_type(n_vocab)
    small = write(tmp_path / "b.bin", [7, 65535])
    assert TokenStream.open([tmp_path / "a.bin", small])[2:6].tolist() == [0, n_vocab - 2, 7, 65535]


def test_a_token_that_does_not_fit_is_never_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.bin")
    with pytest.raises(AssertionError, match="does not fit"):
        writer.append(np.array([65536]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=7), min_size=1, max_size=5), st.data())
def test_a_stream_is_the_shards_one_after_the_other(tmp_path_factory, shards: list[list[int]], data) -> None:
    folder = tmp_path_factory.mktemp("shards")
    stream = TokenStream.open([write(folder / f"{n}.bin", shard) for n, shard in enumerate(shards)])
    whole = [token for shard in shards for token in shard]
    start, stop = (data.draw(st.integers(0, len(whole) + 3)) for _ in range(2))
    assert len(stream) == len(whole)
    assert stream[start:stop].tolist() == whole[start:stop] and stream[start:stop].dtype == np.int64
    low, high = sorted((min(start, len(whole)), min(stop, len(whole))))
    assert stream.part(low, high)[:].tolist() == whole[low:high]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 500), "cut short"),
        (lambda path: os.truncate(path, 1024 + 5), "damaged"),
        (lambda path: path.write_bytes(b"text" * 1000), "not a token shard"),
        (lambda path: path.write_bytes(struct.pack("<3i", 20240520, 2, 0) + bytes(1012)), "not a token shard"),
        (lambda path: path.write_bytes(path.read_bytes() + b"xx"), "damaged"),
        (lambda path: path.write_bytes(struct.pack("<3i", 20240801, 7, 3) + bytes(1012 + 10)), "damaged"),
        (lambda path: path.write_bytes(struct.pack("<3i", 20240801, 1, 3) + bytes(1012 + 12)), "not a token shard"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, words: str) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3])
    damage(path)
    with pytest.raises(UserError, match=words) as caught:
        open_shard(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 1024 + 2 * 4), lambda path: os.truncate(path, 0)])
def test_a_shard_that_is_cut_short_while_in_use_is_one_line(tmp_path: Path, damage) -> None:
    path = write(tmp_path / "a.bin", range(5000))
    stream = TokenStream.open([path])
    assert stream[4990:4993].tolist() == [4990, 4991, 4992]
    damage(path)
    with pytest.raises(DataLost, match="a.bin was cut short while it was in use; copy it again"):
        stream[3:4999]


def test_a_shard_may_be_deleted_while_in_use(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(9))
    part = TokenStream.open([path]).part(2, 8)
    path.unlink()
    assert part[1:3].tolist() == [3, 4] and part.part(4, 6)[:].tolist() == [6, 7]


def test_more_shards_than_files_may_be_open_at_first(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = [write(tmp_path / f"{number}.bin", [number]) for number in range(80)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        assert TokenStream.open(paths)[:].tolist() == list(range(80))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
