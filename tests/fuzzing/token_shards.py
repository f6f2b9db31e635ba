"""Token shards and prepared folders: invented, damaged, or with a false description."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from andrea.config import DataConfig, Text, TokenizerConfig
from andrea.text.corpus import open_corpus
from andrea.text.loader import Loader
from andrea.text.shards import LAYOUTS, MAGIC, WIDE_MAGIC, ShardWriter
from fuzzing.raw_values import damaged, json_text, replaced, wild_json
from fuzzing.trial import Handler

int32 = st.one_of(
    st.sampled_from([0, 1, 2, 3, 49, 50, 51, 100, -1, -(2**31), 2**31 - 1, MAGIC, MAGIC + 1]),
    st.integers(-(2**31), 2**31 - 1),
)
header_numbers = st.one_of(
    st.tuples(st.sampled_from([MAGIC, MAGIC, MAGIC, MAGIC, 0]), st.sampled_from([1, 1, 1, 1, 2]), int32),
    st.tuples(st.just(WIDE_MAGIC), st.sampled_from([7, 7, 1]), int32),
    st.tuples(int32, int32, int32),
)
shard_files = st.builds(
    lambda header, tokens, honest, tail, cut: shard_bytes(header, tokens, honest, tail, cut),
    header_numbers,
    st.lists(st.one_of(st.integers(0, 257), st.integers(0, 2**16 - 1)), max_size=60),
    st.booleans(),
    st.sampled_from([b"", b"", b"", b"\0", b"\0\0"]),
    st.sampled_from([0, 0, 0, 0, 1, 7, 60, 1000, 1023, 10**6]),
)
shards = st.one_of(
    st.tuples(
        st.just("foreign"),
        st.dictionaries(st.sampled_from(["a.bin", "b.bin", "val.bin", "tokenizer.json"]), shard_files, max_size=3),
    ),
    st.tuples(
        st.sampled_from(["prepared text", "prepared shards"]),
        st.sampled_from(["meta.json", "verified.json"]),
        wild_json,
        st.integers(),
    ),
    st.tuples(
        st.sampled_from(["damaged text", "damaged shards"]),
        st.sampled_from(["meta.json", "verified.json", "tokenizer.json", "train-000000.bin", "val-000000.bin"]),
        st.one_of(st.none(), shard_files),
        st.integers(),
    ),
)


def shard_bytes(header: tuple[int, int, int], tokens: list[int], honest: bool, tail: bytes, cut: int) -> bytes:
    numbers = np.zeros(256, dtype="<i4")
    numbers[:3] = (*header[:2], len(tokens)) if honest else header
    kind = LAYOUTS.get((int(numbers[0]), int(numbers[1])), np.dtype("<u2"))
    content = numbers.tobytes() + np.array(tokens, dtype=kind).tobytes() + tail
    return content[: len(content) - cut] if cut else content


def data_config(kind: str, path: Path) -> DataConfig:
    return DataConfig(kind, Text(path), {})


def make_shards(folder: Path) -> Handler:
    byte = TokenizerConfig("byte", None, None)
    text, own = folder / "notes", folder / "own"
    for place in (text, own):
        place.mkdir(parents=True)
    (text / "a.txt").write_text("the quick brown fox\n" * 40)
    for name, count in (("train.bin", 300), ("val.bin", 60)):
        writer = ShardWriter(own / name)
        writer.append(np.arange(count) % 257)
        writer.close()
    good = {"text": data_config("text", text), "shards": data_config("shards", own)}
    contents: dict[str, tuple[Path, dict[str, bytes]]] = {}
    for kind, data in good.items():
        made = open_corpus(data, byte, folder / "data", str).sources[0].folder
        contents[kind] = made, {path.name: path.read_bytes() for path in made.iterdir()}

    def handle(tried: tuple) -> None:
        what, *rest = tried
        if what == "foreign":
            place, data_dir = folder / "foreign", folder / "foreign-data"
            for path in (place, data_dir):
                shutil.rmtree(path, ignore_errors=True)
            place.mkdir()
            for name, content in rest[0].items():
                (place / name).write_bytes(content)
            read_everything(data_config("shards", place), data_dir)
            return
        kind, (name, new, rng_seed) = what.split()[1], rest
        place, whole = contents[kind]
        rng = random.Random(rng_seed)
        for path in place.iterdir():
            path.unlink()
        for each, content in whole.items():
            (place / each).write_bytes(content)
        before = whole.get(name, b"{}")
        if what.startswith("prepared"):
            (place / name).write_bytes(json_text(replaced(json.loads(before), new, rng)))
        else:
            (place / name).write_bytes(damaged(before, rng) if new is None else new)
        read_everything(good[kind], folder / "data")

    def read_everything(data: DataConfig, data_dir: Path) -> None:
        corpus = open_corpus(data, byte, data_dir, str)
        for source in corpus.sources:
            assert all(
                int(stream[:].max(initial=0)) < corpus.tokenizer.n_vocab for stream in (source.train, source.val)
            )
            assert source.val_bytes >= 0 and source.train_bytes >= 0
        if all(len(source.train) > 1 for source in corpus.sources):
            Loader(corpus.sources, 16, 1).batch(0, 3)

    return handle
