"""Values of every kind that a user or a damaged file may give, and damage to bytes and to JSON."""

from __future__ import annotations

import copy
import json
import operator
import random
from typing import Any

from hypothesis import strategies as st

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
    "out.html", "out.npz", "out.png", "3.7", "5.*", "*.*",
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

any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # with lone surrogates and control characters
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


def damaged(content: bytes, rng: random.Random) -> bytes:
    """`content` with a bit flipped, or bytes cut off, inserted, doubled or deleted; one to five times."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(5)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"9" * 30, b'"', b"{", b" "])
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            del data[at : at + rng.randrange(1, 20)]
    return bytes(data)


def replaced(tree: Any, value: Any, rng: random.Random) -> Any:
    """`tree`, of JSON, with `value` in place of one node or next to it, or without that node."""
    nodes: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            nodes.append((node, key))
            walk(node[key])

    tree = copy.deepcopy(tree)
    walk(tree)
    if not nodes or rng.random() < 0.03:
        return value
    node, key = rng.choice(nodes)
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[str(value)[:20]] = value
    else:
        node[key] = value
    return tree
