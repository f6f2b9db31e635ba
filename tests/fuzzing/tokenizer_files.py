"""Tokenizer files: invented ranks, damage, false descriptions."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from andrea.text.load_tokenizer import load_tokenizer
from andrea.text.tokenizer import ByteTokenizer, RankTokenizer, train_bpe, without_surrogates
from fuzzing.raw_values import DEEP, any_text, damaged, json_text, replaced, wild_json
from fuzzing.trial import Handler

rank_lines = st.lists(
    st.one_of(
        st.builds(
            lambda token, rank: token + b" " + rank,
            st.binary(max_size=12),
            st.sampled_from([b"0", b"256", b"-1", b"9" * 5000, b"x", b"1e3"]),
        ),
        st.sampled_from(
            [
                b"",
                b"YQ==",
                b"YQ== 256",
                b"YWI= 256",
                b"==== 256",
                b" 256",
                b"YWI= 256 1",
                b"YWI=\x0b256",
                b"YWI=\xa0256",
            ]
        ),
        st.binary(max_size=20),
    ),
    max_size=6,
)
tokenizer_files = ["tokenizer.json", "tokenizer.tiktoken"]
tokenizers = st.one_of(
    st.tuples(st.just("ranks"), st.just("tokenizer.tiktoken"), rank_lines, st.integers()),
    st.tuples(
        st.just("odd"),
        st.just("tokenizer.tiktoken"),
        st.sets(st.binary(min_size=2, max_size=12), max_size=20),
        st.integers(),
    ),
    st.tuples(st.just("bits"), st.sampled_from(tokenizer_files), st.just(None), st.integers()),
    st.tuples(st.just("tree"), st.just("tokenizer.json"), wild_json, st.integers()),
    st.tuples(
        st.just("pattern"),
        st.just("tokenizer.json"),
        st.one_of(
            any_text,
            st.sampled_from(
                [
                    "(a+)+$",
                    "(",
                    "(?<=a+)b",
                    "(a|a)*b\\1",
                    "\\p{Nope}",
                    "",
                    "a{1000}{1000}{1000}",
                    ".*.*.*.*.*x",
                    "(?:)" * 9999,
                ]
            ),
        ),
        st.integers(),
    ),
    st.tuples(
        st.just("raw"),
        st.sampled_from(tokenizer_files),
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from(
                [
                    DEEP.encode(),
                    b"null",
                    b"[]",
                    b"{}",
                    b'{"kind":[]}',
                    b'{"kind":"bpe"}',
                    b'{"kind":"byte","identity":1e999}',
                    b"9" * 5000,
                ]
            ),
        ),
        st.integers(),
    ),
)


def make_tokenizers(folder: Path) -> Handler:
    content: list[dict[str, bytes]] = []
    for number, tokenizer in enumerate([train_bpe(["aaaa bbbb abab the fox"] * 3, 265), ByteTokenizer()]):
        place = folder / f"good-{number}"
        place.mkdir(parents=True)
        tokenizer.save(place)
        content.append({path.name: path.read_bytes() for path in place.iterdir()})
    place = folder / "hostile"
    place.mkdir()

    def handle(tried: tuple[str, str, Any, int]) -> None:
        what, name, new, rng_seed = tried
        rng = random.Random(rng_seed)
        files = dict(content[0] if name == "tokenizer.tiktoken" or rng_seed % 4 else content[1])
        if what == "ranks":
            lines = files[name].splitlines()
            at = rng.randrange(len(lines))
            lines[at : at + rng.randrange(3)] = new
            files[name] = b"\n".join(lines)
        elif what == "odd":  # a valid file that training never gives: ids in any order, tokens without a merge
            tokens = [bytes([value]) for value in range(256)] + sorted(new)
            rng.shuffle(tokens)
            RankTokenizer("bpe", {token: rank for rank, token in enumerate(tokens)}).save(place)
            files = {each: (place / each).read_bytes() for each in tokenizer_files}
        elif what == "bits":
            files[name] = damaged(files[name], rng)
        elif what == "raw":
            files[name] = new
        else:
            tree = json.loads(files[name])
            files[name] = json_text(replaced(tree, new, rng) if what == "tree" else tree | {"pattern": new})
        if what == "ranks" and rng_seed % 2:  # an attacker who can write the ranks can write their checksum
            files["tokenizer.json"] = json_text(
                json.loads(files["tokenizer.json"]) | {"sha256": hashlib.sha256(files[name]).hexdigest()}
            )
        for each in tokenizer_files:
            (place / each).unlink(missing_ok=True)
        for each, data in files.items():
            (place / each).write_bytes(data)
        found = load_tokenizer(place)
        for text in ("aaaa abab 12", "a" * 300 + "\ud800"):
            assert found.decode(found.encode(text)) == without_surrogates(text)

    return handle
