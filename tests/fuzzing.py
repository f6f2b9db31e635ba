"""Hostile inputs for the five borders, and what must hold for each: it is taken, or refused with a UserError.

Anything else is a finding: another exception, more than SECONDS or WAITING_SECONDS for one input, more than MEGABYTES of
memory.
`tests/system/test_fuzz.py` tries a few hundred of them, `bench/fuzz.py` a hundred thousand.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import operator
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from andrea.checkpoint import write_checkpoint
from andrea.checkpoint.model import load_model
from andrea.cli.command_line import CommandLine, compose, lay_over, one_line, read
from andrea.cli.sweep import read_values, split
from andrea.cli.words import to_key_value
from andrea.config import (
    AttentionConfig,
    CompareConfig,
    DashboardConfig,
    DataConfig,
    LensConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    Text,
    TokenizerConfig,
    UserError,
    parse,
    to_plain,
)
from andrea.generation.engine import Engine, Request
from andrea.generation.sampling import Sampling
from andrea.generation.session import describe, read_prompt
from andrea.model.gpt import GPT, initialise
from andrea.text.corpus import open_corpus
from andrea.text.loader import Loader
from andrea.text.shards import MAGIC, ShardWriter
from andrea.text.tokenizer import (
    ByteTokenizer,
    RankTokenizer,
    Tokenizer,
    load_gpt2,
    load_tokenizer,
    train_bpe,
    without_surrogates,
)
from andrea.training.planning.dry_run import describe as describe_plan
from andrea.training.planning.length import with_length_and_name

SECONDS = 5.0  # of the processor
WAITING_SECONDS = 30.0  # of the clock: for what waits, and computes nothing
MEGABYTES = 2048
BATCH = 500  # inputs of one hypothesis run: its record of what was tried grows with them
SHOWN = 300  # characters of an input in a finding
GPT2_CACHE = Path(__file__).resolve().parents[2] / "shared" / "data" / "tiktoken-cache"

Survive = Callable[[Any], None]


class TooSlow(BaseException):
    """One input took too long. No Exception: code that is tried must not catch it."""


@dataclass(frozen=True)
class Target:
    """A border: what comes at it, and, made in an empty folder, what takes it."""

    inputs: SearchStrategy
    make: Callable[[Path], Survive]


@dataclass
class Outcome:
    """What became of a target's inputs; a finding is told once a place in the code, with the first input that led there."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""
    peak_memory_mb: float = 0.0
    findings: dict[str, str] = field(default_factory=dict)


def fuzz(target: Target, folder: Path, inputs: int, first_seed: int) -> Outcome:
    """Try `inputs` inputs, one after another; the same ones for the same seed."""
    survive, started = target.make(folder), time.monotonic()
    outcome = Outcome(peak_memory_mb=peak_megabytes())
    while outcome.inputs < inputs:
        left = min(BATCH, inputs - outcome.inputs)

        @seed(first_seed * 1_000_003 + outcome.inputs)
        @settings(
            max_examples=left, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(target.inputs)
        def batch(tried: Any) -> None:
            try_one(survive, tried, outcome)

        batch()
    outcome.seconds = time.monotonic() - started
    return outcome


def try_one(survive: Survive, tried: Any, outcome: Outcome) -> None:
    outcome.inputs += 1
    clock = time.process_time()
    try:
        with limited(SECONDS, WAITING_SECONDS):
            survive(tried)
    except UserError as error:
        outcome.refused += 1
        assert one_line(str(error)).isprintable()
    except (Exception, TooSlow) as error:  # whatever it is, it is what we look for
        place = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in place if "/andrea/" in frame.filename] or place
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        outcome.findings.setdefault(f"{where}: {type(error).__name__}: {error!s:.200}", repr(tried)[:SHOWN])
    seconds = time.process_time() - clock
    if seconds > outcome.slowest_s:
        outcome.slowest_s, outcome.slowest = seconds, repr(tried)[:SHOWN]
    if seconds > SECONDS:
        outcome.findings.setdefault(f"slow: {seconds:.1f} s", repr(tried)[:SHOWN])
    memory = peak_megabytes()
    if memory > MEGABYTES >= outcome.peak_memory_mb:
        outcome.findings.setdefault(f"memory: {memory:.0f} MB", repr(tried)[:SHOWN])
    outcome.peak_memory_mb = memory


@contextmanager
def limited(busy_s: float, waiting_s: float) -> Iterator[None]:
    """Raises TooSlow inside after `busy_s` of processor time, which no neighbour on the machine lengthens, or `waiting_s`."""

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, busy_s), (signal.ITIMER_REAL, signal.SIGALRM, waiting_s))
    before = [signal.signal(number, too_slow) for _, number, _ in timers]
    try:
        for timer, _, seconds in timers:
            signal.setitimer(
                timer, seconds, 1.0
            )  # again and again: a callback of the collector swallows what it raises
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def peak_megabytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# ------------------------------------------------------------------------------------------------------- raw material

LAUGHS = "[&a [x], " + ", ".join(
    f"&{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "[&a {x: 1}, " + ", ".join(
    f"&{b} {{<<: [{', '.join(['*' + a] * 9)}]}}" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
NASTY = [
    "", "null", "none", "auto", "true", "True", "no", "0", "-0", "-1", "1.5", "1e400", "-1e400", "1e308", "5e-324",
    "nan", "-nan", "inf", "0x10", "0o17", "0b11", "1_000", "１２", "²", "٣", "1:30", "190:20:30", "9" * 40, "9" * 5000,
    "0x" + "f" * 5000, "-" + "9" * 400, "1" + "0" * 400, "1" + "0" * 300, str(2**31), str(2**63), str(2**64),
    "0." + "0" * 400 + "1", "2001-99-99", "2001-01-01 25:00:00", "=", "==", "<<", "<<: *a", "{<<: 3}",
    "{<<: {kind: pystdlib}}", "*a", "&a [*a]", "&a {x: *a}", LAUGHS + "]", MERGES + "]", f"{{a: {LAUGHS}]}}",
    "!!python/object/apply:os.system [echo]", "!!python/name:os.system", "!!binary x", "!!binary ====",
    "!!timestamp x", "!!int x", "!!int ''", "!!float x", "!!float ''", "!!bool x", "!!null x", "!!set {a, b}",
    "!!omap [a]", "!!pairs [a]", "!!str [a]", "!!seq {a: b}", "!!map [a]", "[" * 3000, "[" * 3000 + "]" * 3000,
    "{a: " * 3000, "{a: " * 400 + "1" + "}" * 400, "? [a]\n: b", "{[a]: b}", "{{a: b}: c}", "{1: {kind: pystdlib}}",
    "{null: {kind: pystdlib}}", "- a\n- b", "%YAML 9.9\n---\n", "--- a\n--- b",
    "{a: {kind: pystdlib, weight: 1e400}}", "{a: {kind: pystdlib, weight: " + "9" * 400 + "}}",
    "{a: {kind: text, path: [1]}}", '{a: {kind: text, path: "\\0"}}', '{"\\ud800": {kind: pystdlib}}',
    '{a: {kind: text, path: "\\ud800"}}', "{a: {kind: [text]}}", "{a: {}}", "{a: null}", "{a: 3}",
    "{a: {kind: text, path: .nan, weight: .inf}}", "[a, [b, [c]]]", "[null, 1, {a: b}]", "${oc.env:HOME}",
    "${train.steps}", "${", "}", "???", "@", "@/dev/zero", "@/dev/null", "@" + "a" * 5000, "\0", "a\0b", "\x1b[31m",
    "\ud800", "\udcff", "\ud83d\ude00", "\ufeff", "\u2028", "\u202e", "../../etc/passwd", "/dev/null", "/dev/zero",
    "/proc/self/mem", "/proc/self/fd/0", "~", "~nobody-of-this-name/x", "~\0", ".", "..", "/", "//", "a" * 300,
    "a/" * 3000, "/" * 5000, "%s%n", "{model}{tokens}{seed}", "{", "\\", "'", '"', "\n", "\r\n", "\t", " ", "cuda:",
    "cuda:²", "cuda:99999999999999999999", "cpu:9", "auto:0", "mps:1", "1600x1000", "９００x９００", "²x²",
    "9" * 5000 + "x9", "1600x1000x3", "out.html", "out.npz", "out.png", "3.7", "5.*", "*.*",
]  # fmt: skip
CHOICES = [
    "andrea-nano",
    "andrea-12m",
    "gpt2",
    "nano-nope",
    "scaled_dot",
    "dot",
    "bilinear",
    "cosine",
    "additive",
    "sliding_window",
    "qk_clip",
    "packed_documents",
    "pystdlib",
    "text",
    "shards",
    "mixture",
    "shakespeare",
    "fineweb_edu",
    "byte",
    "bpe",
    "muon",
    "adamw",
    "wandb",
    "default",
]

any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates, controls and all
repeated = st.builds(
    lambda text, characters: text * -(-characters // len(text)),
    st.text(st.characters(exclude_categories=()), min_size=1, max_size=3),
    st.sampled_from([100, 5_000, 100_000]),
)
wild_text = st.one_of(
    st.sampled_from(NASTY), any_text, st.builds(operator.add, st.sampled_from(NASTY), any_text), repeated
)
numbers = st.one_of(
    st.integers(0, 300),
    st.sampled_from(
        [0, 1, 2, 4, 8, 16, 32, 64, 257, 4096, 65536, 10**6, 10**9, 10**12, 2**31, 2**63, 10**18, 10**40, 10**400, -1]
    ),
    st.integers(),
    st.floats(),
    st.sampled_from([1e-320, 1e-9, 0.1, 0.9, 1e30, 1e300, -0.0]),
)
wild_json = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        numbers,
        any_text,
        st.sampled_from(["", "byte", "bpe", "../x", "\ud800", "F32", "I64"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(any_text, inner, max_size=4)),
    max_leaves=6,
)
DEEP = "[" * 50_000


def json_text(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def damaged(content: bytes, chance: random.Random) -> bytes:
    """`content` with bytes flipped, cut off, put in or put twice."""
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at, kind = chance.randrange(len(data) + 1), chance.randrange(5)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = chance.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"9" * 30, b'"', b"{", b" "])
        elif kind == 3:
            data[at:at] = data[at : at + chance.randrange(1, 40)]
        else:
            del data[at : at + chance.randrange(1, 20)]
    return bytes(data)


def replaced(tree: Any, value: Any, chance: random.Random) -> Any:
    """`tree` (of JSON) with one node, anywhere, replaced by `value`, taken away or given `value` as a companion."""
    nodes: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            nodes.append((node, key))
            walk(node[key])

    tree = copy.deepcopy(tree)
    walk(tree)
    if not nodes or chance.random() < 0.03:
        return value
    node, key = chance.choice(nodes)
    kind = chance.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[str(value)[:20]] = value
    else:
        node[key] = value
    return tree


# ------------------------------------------------------------------------------------------------------ configuration

KINDS: dict[type, str] = {
    RunConfig: "train",
    SampleConfig: "sample",
    LensConfig: "lens",
    CompareConfig: "compare",
    DashboardConfig: "dashboard",
}


def known_keys(kind: type, prefix: str = "") -> list[tuple[str, Any]]:
    """Every dotted key with its type."""
    found: list[tuple[str, Any]] = []
    for name, hint in typing.get_type_hints(kind).items():
        found.append((prefix + name, hint))
        if is_dataclass(hint):
            found += known_keys(hint, f"{prefix}{name}.")
    return found


def plausible(hint: Any) -> SearchStrategy[str]:
    """What a user might type for a key of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from([str(argument) for argument in arguments])
    if arguments and origin not in (list, dict):
        return st.one_of([plausible(argument) for argument in arguments])
    if hint is int:
        return st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64, 100, 256, 1024, 10**6, 10**9, 10**13, 10**18]).map(str)
    if hint is float:
        return st.one_of(
            st.sampled_from(["0.5", "1e-3", "1", "0.9", "100", "1e15", "1e30", "1e300"]), st.floats().map(str)
        )
    if hint is bool:
        return st.sampled_from(["true", "false"])
    if hint is type(None):
        return st.just("null")
    if origin is list:
        return st.sampled_from(["[a, b]", "a", "[]", "3.7"])
    if origin is dict:
        return st.sampled_from(["{code: {kind: pystdlib}, notes: {kind: text, path: notes/, weight: 0.3}}", "{}"])
    if is_dataclass(hint):
        return st.sampled_from(CHOICES)
    return st.one_of(st.sampled_from(["notes", "runs/a", "out.html", "~/x"]), any_text)


def word_of(kind: type) -> SearchStrategy[str]:
    typed = [
        st.builds(
            lambda value, key=key: f"{key}={value}",
            st.one_of(plausible(hint), plausible(hint), st.sampled_from(NASTY), numbers.map(number_text), wild_text),
        )
        for key, hint in known_keys(kind)
    ]
    known = st.one_of(typed)
    strange_key = st.one_of(
        st.sampled_from(
            [
                "hydra.run.dir",
                "hydra/launcher",
                "+a",
                "~model",
                "++",
                "model.",
                ".model",
                "data.sources.a.b.c",
                "train.steps.x",
                "model@x",
                "_target_",
                "defaults",
                "--config-dir",
                "__class__",
                "data.sources.a.kind",
            ]
        ),
        any_text,
        known.map(lambda word: word.partition("=")[0][:-1]),
    )
    strange = st.one_of(st.builds(lambda key, value: f"{key}={value}", strange_key, wild_text), wild_text)
    return st.one_of([known] * 9 + [strange])


def number_text(number: float) -> str:
    """As typed; an int beyond what Python writes in decimal becomes a power of ten."""
    return f"{number:d}" if isinstance(number, int) and abs(number) < 10**4000 else str(number)


configurations = st.one_of(
    [
        st.tuples(st.just(kind), st.lists(word_of(kind), min_size=1, max_size=5), st.integers(0, 99))
        for kind in (RunConfig, RunConfig, RunConfig, SampleConfig, LensConfig, CompareConfig, DashboardConfig)
    ]
)


@functools.lru_cache(maxsize=200)
def composed(kind: type, groups: tuple[tuple[str, str], ...]) -> dict:
    return compose(kind, KINDS[kind], CommandLine(dict(groups), {}))


def is_small(run: RunConfig) -> bool:
    """Cheap to count: what a large model costs to count is no matter of the border."""
    sizes = (run.model.d_model, run.model.d_mlp, run.model.sequence_length)
    return run.model.n_layer <= 8 and max(sizes) <= 4096 and run.sequences_per_step <= 4096


def make_configurations(folder: Path) -> Survive:
    describe_plan(parse(RunConfig, copy.deepcopy(composed(RunConfig, ()))))  # what is loaded once is no input's time

    def survive(tried: tuple[type, list[str], int]) -> None:
        kind, words, lot = tried
        if kind is RunConfig and lot % 10 == 0:
            read_values(split(words)[0])
        if kind is CompareConfig:
            words = to_key_value(words, positional="runs")
        if kind is DashboardConfig:
            words = to_key_value(words)
        line = read(kind, words)
        if lot == 1:
            plain = compose(kind, KINDS[kind], line)
        else:
            plain = lay_over(copy.deepcopy(composed(kind, tuple(sorted(line.groups.items())))), line.values)
        run = parse(kind, plain)
        if kind is CompareConfig:
            assert len(run.size_pixels) == 2
        if kind is RunConfig and is_small(run):
            run = with_length_and_name(run)
            if 1 < lot < 6:
                describe_plan(run)

    return survive


# ------------------------------------------------------------------------------------------------------- token shards

int32 = st.one_of(
    st.sampled_from([0, 1, 2, 3, 49, 50, 51, 100, -1, -(2**31), 2**31 - 1, MAGIC, MAGIC + 1]),
    st.integers(-(2**31), 2**31 - 1),
)
header_numbers = st.one_of(
    st.tuples(st.sampled_from([MAGIC, MAGIC, MAGIC, MAGIC, 0]), st.sampled_from([1, 1, 1, 1, 2]), int32),
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
    content = numbers.tobytes() + np.array(tokens, dtype="<u2").tobytes() + tail
    return content[: len(content) - cut] if cut else content


def data_config(kind: str, path: Path) -> DataConfig:
    return DataConfig(kind, Text(path), {})


def make_shards(folder: Path) -> Survive:
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

    def survive(tried: tuple) -> None:
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
        kind, (name, new, lot) = what.split()[1], rest
        place, whole = contents[kind]
        chance = random.Random(lot)
        for path in place.iterdir():
            path.unlink()
        for each, content in whole.items():
            (place / each).write_bytes(content)
        before = whole.get(name, b"{}")
        if what.startswith("prepared"):
            (place / name).write_bytes(json_text(replaced(json.loads(before), new, chance)))
        else:
            (place / name).write_bytes(damaged(before, chance) if new is None else new)
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

    return survive


# -------------------------------------------------------------------------------------------------------- checkpoints

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
tensor_entries = st.fixed_dictionaries(  # JSON as the library reads it; what is in it need not fit
    {
        "dtype": st.one_of(dtypes, dtypes, clean_numbers),
        "shape": st.one_of(st.lists(clean_numbers, max_size=4), clean_numbers, st.none()),
        "data_offsets": st.lists(clean_numbers, min_size=2, max_size=2)
        | st.lists(clean_numbers, max_size=3)
        | st.text(max_size=3),
    }
)
fitting_tensors = st.lists(  # offsets and sizes that fit: only what they say of the model is wrong
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


def tiny_model(n_vocab: int, end_of_text: int, **changes: Any) -> GPT:
    words = ["model.d_model=16", "model.n_layer=2", "model.n_head=2", "model.d_mlp=32", "model.sequence_length=32"]
    values = lay_over(copy.deepcopy(composed(RunConfig, ())), read(RunConfig, words).values)
    model = GPT(
        parse(ModelConfig, values["model"] | changes, "model"),
        parse(AttentionConfig, values["attention"], "attention"),
        n_vocab,
        end_of_text,
    )
    initialise(model, torch.Generator().manual_seed(0))
    return model.eval().requires_grad_(False)


def make_checkpoints(folder: Path) -> Survive:
    from andrea.checkpoint import read_checkpoint

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

    def survive(tried: tuple[str, str, Any, int]) -> None:
        what, name, new, lot = tried
        files, chance = dict(content), random.Random(lot)
        if what in ("tensors", "raw"):
            files[name] = new
        elif what == "bits":
            files[name] = damaged(content[name], chance)
        elif what == "tree":
            files[name] = json_text(replaced(json.loads(content[name]), new, chance))
        elif what == "config":
            tree = json.loads(content["state.json"])
            tree["config"][name] = replaced(tree["config"][name], new, chance)
            files["state.json"] = json_text(tree)
        elif what == "headers":
            size = int.from_bytes(content[name][:8], "little")
            header = json_text(replaced(json.loads(content[name][8 : 8 + size]), new, chance))
            files[name] = len(header).to_bytes(8, "little") + header + content[name][8 + size :]
        else:
            size = 8 + int.from_bytes(content[name][:8], "little")
            numbers = np.frombuffer(content[name][size:], dtype="<f4").copy()
            numbers[chance.randrange(len(numbers)) if chance.random() < 0.7 else slice(None)] = new
            files[name] = content[name][:size] + numbers.tobytes()
        if name != "manifest.json" and (what != "bits" or new):  # who writes the files writes the manifest too
            listed = {
                each: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for each, data in files.items()
                if each != "manifest.json"
            }
            files["manifest.json"] = json_text({"format_version": 1, "files": listed})
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for each, data in files.items():
            (place / each).write_bytes(data)
        checkpoint = read_checkpoint(place)
        found = checkpoint.tokenizer()
        checkpoint.optimizer_tensors()
        model = load_model(checkpoint, found)
        describe(checkpoint, model, found, "cpu")
        engine = Engine(model, found, dtype=torch.float32)
        engine.write("the fox", Request(max_new_tokens=2, sampling=Sampling(temperature=0.8)))

    return survive


# --------------------------------------------------------------------------------------------------------- tokenizers

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


def make_tokenizers(folder: Path) -> Survive:
    content: list[dict[str, bytes]] = []
    for number, tokenizer in enumerate([train_bpe(["aaaa bbbb abab the fox"] * 3, 265), ByteTokenizer()]):
        place = folder / f"good-{number}"
        place.mkdir(parents=True)
        tokenizer.save(place)
        content.append({path.name: path.read_bytes() for path in place.iterdir()})
    place = folder / "hostile"
    place.mkdir()

    def survive(tried: tuple[str, str, Any, int]) -> None:
        what, name, new, lot = tried
        chance = random.Random(lot)
        files = dict(content[0] if name == "tokenizer.tiktoken" or lot % 4 else content[1])
        if what == "ranks":
            lines = files[name].splitlines()
            at = chance.randrange(len(lines))
            lines[at : at + chance.randrange(3)] = new
            files[name] = b"\n".join(lines)
        elif (
            what == "odd"
        ):  # whole, and like nothing that training makes: ids in any order, tokens that nothing merges to
            tokens = [bytes([value]) for value in range(256)] + sorted(new)
            chance.shuffle(tokens)
            RankTokenizer("bpe", {token: rank for rank, token in enumerate(tokens)}).save(place)
            files = {each: (place / each).read_bytes() for each in tokenizer_files}
        elif what == "bits":
            files[name] = damaged(files[name], chance)
        elif what == "raw":
            files[name] = new
        else:
            tree = json.loads(files[name])
            files[name] = json_text(replaced(tree, new, chance) if what == "tree" else tree | {"pattern": new})
        if what == "ranks" and lot % 2:  # who writes the ranks writes their checksum too
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

    return survive


# ------------------------------------------------------------------------------------------------------------ prompts

megabyte = st.builds(
    lambda text, characters: text * -(-characters // len(text)),
    st.text(st.characters(exclude_categories=()), min_size=1, max_size=4),
    st.just(1 << 20),
)
prompts_text = st.one_of(*[any_text] * 20, *[wild_text] * 10, *[st.text(max_size=400)] * 10, *[repeated] * 2, megabyte)
positive_numbers = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0, 1e9, 1e300]))
sampling_words = st.fixed_dictionaries(
    {},
    optional={
        "temperature": positive_numbers,
        "top_k": st.sampled_from([1, 2, 5, 256, 257, 10**9, 2**63, 10**30]),
        "top_p": st.one_of(st.floats(0, 1), st.sampled_from([1e-300, 0.0, 1.0])),
        "min_p": st.one_of(st.floats(0, 1), st.sampled_from([1e-300, 0.0, 1.0])),
        "repetition_penalty": positive_numbers,
        "seed": st.sampled_from([0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40]),
        "num_samples": st.sampled_from([1, 1, 2, 3, 10**6, 10**18]),
        "max_new_tokens": st.sampled_from([1, 2, 3, 3, 3, 40, 10**12, 2**63]),
        "stop": any_text,
    },
)
usual_words = st.sampled_from([{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"num_samples": 2, "stop": "e"}])
prompts = st.tuples(
    st.sampled_from(["byte", "bpe", "gpt2"]), prompts_text, st.one_of(usual_words, usual_words, sampling_words)
)


def make_prompts(folder: Path) -> Survive:
    tokenizers: dict[str, Tokenizer] = {"byte": ByteTokenizer(), "bpe": train_bpe([Path(__file__).read_text()], 400)}
    if GPT2_CACHE.is_dir():
        tokenizers["gpt2"] = load_gpt2(str(GPT2_CACHE))
    engines = {
        name: Engine(tiny_model(tokenizer.n_vocab, tokenizer.end_of_text), tokenizer, dtype=torch.float32)
        for name, tokenizer in tokenizers.items()
    }

    def survive(tried: tuple[str, str, dict[str, Any]]) -> None:
        name, text, given = tried
        engine = engines.get(name, engines["byte"])
        words = [f"prompt={text}", *(f"{key}={value}" for key, value in given.items())]
        line = read(SampleConfig, words)
        run = parse(SampleConfig, lay_over(copy.deepcopy(composed(SampleConfig, ())), line.values))
        assert run.prompt == text
        if text != "-":  # which reads standard input
            read_prompt(run.prompt)
        tokenizer = engine.tokenizer
        ids = tokenizer.encode_array(text)
        assert int(ids.max(initial=0)) < tokenizer.n_vocab
        assert tokenizer.decode(ids.tolist()) == without_surrogates(text)
        request = Request(
            run.max_new_tokens,
            run.num_samples,
            run.seed,
            tuple(run.stop),
            Sampling(run.temperature, run.top_k, run.top_p, run.min_p, run.repetition_penalty),
        )
        tokens = engine.encode(text)
        if run.max_new_tokens * run.num_samples <= 200:  # more would only take its time
            for piece in engine.stream(tokens, request):
                piece.text.encode()

    return survive


TARGETS = {
    "configuration": Target(configurations, make_configurations),
    "token shards": Target(shards, make_shards),
    "checkpoints": Target(checkpoints, make_checkpoints),
    "tokenizer files": Target(tokenizers, make_tokenizers),
    "prompts": Target(prompts, make_prompts),
}
