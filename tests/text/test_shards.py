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
from andrea.text.shards import DataLost, ShardWriter, TokenStream, open_shard


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
