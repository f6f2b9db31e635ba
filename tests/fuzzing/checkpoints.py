"""Checkpoint folders with invented tensors, damaged files, a false state or numbers that are not finite."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from andrea.checkpoint import read_checkpoint, write_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import AttentionConfig, RunConfig, parse, to_plain
from andrea.generation.engine import Engine, Request
from andrea.generation.sample_command import describe
from andrea.generation.sampling import Sampling
from andrea.text.tokenizer import train_bpe
from fuzzing.composed import composed, tiny_model
from fuzzing.raw_values import DEEP, damaged, json_text, numbers, replaced, wild_json
from fuzzing.trial import Handler

DTYPE_BYTES = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
               "F8_E8M0": 1, "C64": 8, "U64": 8, "U16": 2}  # fmt: skip
dtypes = st.sampled_from([*DTYPE_BYTES, "F4", "F6_E2M3", "x", "\u00e9"])
clean_numbers = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, -1, 0.5]))
clean_names = st.one_of(
    st.sampled_from(
        ["embedding.weight", "final_norm.weight", "__metadata__", "../x", "blocks.0.mlp.up.weight", "/", "\0"]
    ),
    st.text(max_size=8),
)
tensor_entries = st.fixed_dictionaries(  # as safetensors writes them, with any content
    {
        "dtype": st.one_of(dtypes, dtypes, clean_numbers),
        "shape": st.one_of(st.lists(clean_numbers, max_size=4), clean_numbers, st.none()),
        "data_offsets": st.lists(clean_numbers, min_size=2, max_size=2)
        | st.lists(clean_numbers, max_size=3)
        | st.text(max_size=3),
    }
)
fitting_tensors = st.lists(  # offsets and sizes are right; names, types and shapes are not the model's
    st.tuples(
        clean_names, st.sampled_from(list(DTYPE_BYTES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 255)
    ),
    max_size=5,
    unique_by=lambda entry: entry[0],
)
any_length = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.sampled_from([0, 1, 2**60, 2**62, 2**64 - 1, 100_000_001]),
    st.integers(0, 2**64 - 1),
)
raw_headers = st.sampled_from(
    [DEEP.encode(), b"\xff\xfe", b'{"a":' * 5000, b'{"a":1,"a":1}', b" " * 1000, b'{"a":NaN}']
)
safetensors_files = st.one_of(
    st.builds(lambda tensors: fitting_bytes(tensors), fitting_tensors),
    st.builds(
        lambda length, entries, tail: headed(length, json_text(entries)) + tail,
        any_length,
        st.dictionaries(clean_names, st.one_of(tensor_entries, tensor_entries, clean_numbers, st.none()), max_size=4),
        st.binary(max_size=200),
    ),
    st.builds(lambda length, header: headed(length, header), any_length, raw_headers | wild_json.map(json_text)),
)
checkpoint_files = [
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tokenizer.json",
    "tokenizer.tiktoken",
    "manifest.json",
]
checkpoints = st.one_of(
    st.tuples(st.just("tensors"), st.sampled_from(checkpoint_files[:2]), safetensors_files, st.integers()),
    st.tuples(st.just("headers"), st.sampled_from(checkpoint_files[:2]), wild_json, st.integers()),
    st.tuples(st.just("bits"), st.sampled_from(checkpoint_files), st.booleans(), st.integers()),
    st.tuples(
        st.just("tree"),
        st.sampled_from(["state.json", "state.json", "manifest.json", "tokenizer.json"]),
        st.one_of(wild_json, wild_json, numbers),
        st.integers(),
    ),
    st.tuples(st.just("config"), st.sampled_from(["model", "attention"]), st.one_of(numbers, wild_json), st.integers()),
    st.tuples(
        st.just("raw"),
        st.sampled_from(checkpoint_files),
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(
                [
                    DEEP.encode(),
                    b"null",
                    b"[]",
                    b"{}",
                    b'"',
                    b'{"a":NaN}',
                    b'{"format_version":1e999,"files":{}}',
                    b"9" * 5000,
                ]
            ),
        ),
        st.integers(),
    ),
    st.tuples(
        st.just("poison"),
        st.sampled_from(["model.safetensors"]),
        st.sampled_from([math.nan, math.inf, -math.inf, 3e38]),
        st.integers(),
    ),
)


def headed(length: int | None, header: bytes) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


def fitting_bytes(tensors: list[tuple[str, str, list[int], int]]) -> bytes:
    entries, content = {}, b""
    for name, dtype, shape, byte in tensors:
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + size]}
        content += bytes([byte]) * size
    return headed(None, json_text(entries)) + content


def hostile_files(content: dict[str, bytes], tried: tuple[str, str, Any, int]) -> dict[str, bytes]:
    """`content`, the files of a good checkpoint by name, with one of them changed as `tried` says."""
    what, name, new, rng_seed = tried
    files, rng = dict(content), random.Random(rng_seed)
    if what in ("tensors", "raw"):
        files[name] = new
    elif what == "bits":
        files[name] = damaged(content[name], rng)
    elif what == "tree":
        files[name] = json_text(replaced(json.loads(content[name]), new, rng))
    elif what == "config":
        tree = json.loads(content["state.json"])
        tree["config"][name] = replaced(tree["config"][name], new, rng)
        files["state.json"] = json_text(tree)
    elif what == "headers":
        size = int.from_bytes(content[name][:8], "little")
        header = json_text(replaced(json.loads(content[name][8 : 8 + size]), new, rng))
        files[name] = len(header).to_bytes(8, "little") + header + content[name][8 + size :]
    else:
        size = 8 + int.from_bytes(content[name][:8], "little")
        numbers = np.frombuffer(content[name][size:], dtype="<f4").copy()
        numbers[rng.randrange(len(numbers)) if rng.random() < 0.7 else slice(None)] = new
        files[name] = content[name][:size] + numbers.tobytes()
    if name != "manifest.json" and (what != "bits" or new):  # an attacker who can write files can write the manifest
        listed = {
            each: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for each, data in files.items()
            if each != "manifest.json"
        }
        files["manifest.json"] = json_text({"format_version": 1, "files": listed})
    return files


def make_checkpoints(folder: Path) -> Handler:
    tokenizer = train_bpe(["the quick brown fox jumps over the lazy dog"] * 3, 270)
    model = tiny_model(tokenizer.n_vocab, tokenizer.end_of_text)
    attention = parse(AttentionConfig, composed(RunConfig, ())["attention"], "attention")
    state = {
        "step": 7,
        "tokens": 1792,
        "val_bpb": 2.5,
        "data": "0" * 64,
        "config": {"model": to_plain(model.config), "attention": to_plain(attention)},
    }
    weights = model.state_dict()
    moments = {f"{name}/exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()}
    whole = write_checkpoint(folder / "good", state, weights, moments, tokenizer)
    content = {path.name: path.read_bytes() for path in whole.iterdir()}
    place = folder / "hostile" / "step-00000007"

    def handle(tried: tuple[str, str, Any, int]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for each, data in hostile_files(content, tried).items():
            (place / each).write_bytes(data)
        checkpoint = read_checkpoint(place)
        found = checkpoint.tokenizer()
        checkpoint.optimizer_tensors()
        model = load_model(checkpoint, found)
        describe(checkpoint, model, found, "cpu")
        engine = Engine(model, found, dtype=torch.float32)
        engine.write("the fox", Request(max_new_tokens=2, sampling=Sampling(temperature=0.8)))

    return handle
