"""Sources: which documents there are, which are held out, and which are left out and reported."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import resource
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import documents, folder_of

from andrea.config import DataConfig, TokenizerConfig, UserError
from andrea.text import encodings
from andrea.text.corpus import open_corpus
from andrea.text.encodings import whole_blocks
from andrea.text.held_out import is_held_out
from andrea.text.listing import Findings
from andrea.text.sources import Source


def many(count: int) -> dict[str, bytes]:
    return {f"notes/{n:03d}.txt": f"note {n}\n".encode() * (n + 1) for n in range(count)}


def test_the_split_of_the_standard_library_is_the_documented_one() -> None:
    source = Source("pystdlib", "pystdlib", None)
    folders = {part for name, _, _ in source.listing for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}
    pieces = {split: list(source.pieces(split)) for split in ("train", "val")}
    counts = [sum(piece.begins_document for piece in pieces[split]) for split in ("train", "val")]
    megabytes = [sum(len(piece.text.encode()) for piece in pieces[split]) / 1e6 for split in ("train", "val")]
    if sys.version_info[:3] == (3, 11, 7) and "deb_system" not in sysconfig.get_scheme_names():  # as CPython ships it
        assert counts == [421, 54]
        assert [round(size, 2) for size in megabytes] == [8.14, 0.75]
    assert megabytes[0] > 5 * megabytes[1] > 0


def test_pystdlib_says_that_it_reads_only_the_python_files_of_a_folder_of_the_user(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a.py": b"a = 1\n" * 90, "b.md": b"# b\n" * 90})
    assert Source("pystdlib", "pystdlib", folder).reads_only_python
    assert not Source("text", "text", folder).reads_only_python
    assert not Source("pystdlib", "pystdlib", folder / "a.py").reads_only_python
    assert not Source("pystdlib", "pystdlib", None).reads_only_python


def test_a_folder_without_python_names_the_data_that_reads_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.py file.*data=text reads text"):
        Source("pystdlib", "pystdlib", folder_of(tmp_path, {"b.md": b"# b\n" * 90}))


def test_the_hash_of_the_relative_path_decides(tmp_path: Path) -> None:
    source = Source("s", "text", folder_of(tmp_path, many(60)))
    val = {name for name in many(60) if hashlib.sha256(name.encode()).digest()[0] < 26}
    assert 0 < len(val) < 20 and not source.held_out.cuts_documents
    assert sorted(documents(source, "val")) == sorted(many(60)[name].decode() for name in val)
    assert len(documents(source, "train")) == 60 - len(val)


def test_few_documents_are_cut_at_a_line_near_the_last_tenth(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(100))
    source = Source("s", "text", folder_of(tmp_path, {"a.txt": text.encode()}))
    (train,), (val,) = documents(source, "train"), documents(source, "val")
    assert train + val == text and train.endswith("\n") and val.startswith("line 9") and len(val) > 50


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    piece=st.integers(4, 29),
)
def test_every_byte_is_in_one_split_once_in_pieces_or_whole(tmp_path_factory, text: str, piece: int) -> None:
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "PIECE_BYTES", piece)
        source = Source("s", "text", path)
        assert "".join([*documents(source, "train"), *documents(source, "val")]) == text
        assert all(len(p.text.encode()) <= 2 * piece for p in source.pieces("train"))
        with open(path, "rb") as file:
            assert b"".join(whole_blocks(file, 0, path.stat().st_size)) == text.encode()


def test_ten_documents_of_which_none_is_held_out_are_cut_too(tmp_path: Path) -> None:
    names = [name for name in (f"{n}.md" for n in range(100)) if not is_held_out(name)][:17]
    source = Source("s", "text", folder_of(tmp_path, {name: b"one\ntwo\nthree\nfour\n" for name in names}))
    assert source.held_out.cuts_documents and len(documents(source, "val")) == 17


def test_files_that_are_not_text_are_left_out_and_reported(tmp_path: Path) -> None:
    bad = {f"bad{n}.txt": "ééé".encode() + b"\xff broken" for n in range(5)} | {
        "nul.py": b"a\0b",
        "empty.md": b"",
        "half.txt": "é".encode()[:1],
    }
    source = Source(
        "mine", "text", folder_of(tmp_path, {"good.txt": b"good\ntext\n", "image.png": b"\x89PNG\0", **bad})
    )
    said: list[str] = []
    assert source.check(said.append) == 10
    assert "".join([*documents(source, "train"), *documents(source, "val")]) == "good\ntext\n"
    assert any("left out 1 (empty): empty.md" in line for line in said)
    assert any("left out 5" in line and "bad0.txt" in line and line.endswith("…") for line in said)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no text file"),
        ({"photo.jpg": b"\xff\xd8\0\0"}, "holds no text file"),
        ({".git/notes.txt": b"abc"}, "holds no text file"),
        ({"a.txt": b"", "b.md": b""}, "holds no usable text"),
        ({"a.txt": bytes(range(256))}, "holds no text file"),
        ({"a.jsonl": b"[1]\n"}, "holds no usable text"),
    ],
)
def test_nothing_usable_names_the_key(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        Source("s", "text", folder_of(tmp_path, files), "data.sources.s.path").check(lambda line: None)
    assert "data.sources.s.path" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.path=.*nowhere does not exist"):
        Source("s", "text", tmp_path / "nowhere")


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    texts = [f"text {n} é\n" for n in range(40)]
    lines = [json.dumps({"text": text, "id": n}) for n, text in enumerate(texts)]
    wrong = [
        "",
        "{",
        "[]",
        '{"text": 3}',
        '{"title": "x"}',
        '{"text": ""}',
        '{"text": "\\ud800"}',
        '{"text": "a\\u0000"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\n".join(lines + wrong) + "\n").encode() + b'\xff\n"')
    source = Source("s", "text", path)
    said: list[str] = []
    assert source.check(said.append) == sum(len(text.encode()) for text in texts)
    assert sorted([*documents(source, "train"), *documents(source, "val")]) == sorted(texts)
    held = [text for n, text in enumerate(texts) if is_held_out(f"a.jsonl#{n}")]
    assert documents(source, "val") == held and held
    assert any("(empty): a.jsonl#45" in line for line in said)


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    texts = [f"row {n}\n" for n in range(300)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [*texts, None, ""], "n": list(range(302))}), tmp_path / "a.parquet"
    )
    pyarrow.parquet.write_table(pyarrow.table({"words": ["x"]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 is not all of it")
    source = Source("s", "text", tmp_path)
    said: list[str] = []
    assert source.check(said.append) == sum(len(text) for text in texts)
    assert sorted([*documents(source, "train"), *documents(source, "val")]) == sorted(texts)
    for words in ("2 (empty)", "says that it is text): b.parquet (fields found: words;", "1 (unreadable"):
        assert any(words in line for line in said)


def test_a_file_that_vanishes_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    (tmp_path / "b.jsonl").write_text('{"text": "more"}\n')
    source = Source("s", "text", tmp_path)
    (tmp_path / "b.jsonl").unlink()
    said: list[str] = []
    assert source.check(said.append) == 90 and any("1 (unreadable): b.jsonl" in line for line in said)


@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_too_few_open_files_stop_a_start_and_leave_nothing_out(name: str, spare: int, tmp_path: Path) -> None:
    content = b'{"text": "more"}\n' * 9
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    os.close(first_free := os.dup(0))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + spare, usual[1]))
    try:
        n_byte = Source("s", "text", tmp_path).check(lambda line: None)
    except OSError as error:
        assert error.errno == errno.EMFILE
    else:
        assert spare and n_byte
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match="pip install pyarrow"):
        Source("s", "text", tmp_path).check(lambda line: None)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"\0")])
def test_a_file_that_is_lost_after_the_check_is_not_missing_in_silence(tmp_path: Path, change) -> None:
    """Found by failing every call of `prepare`: an open that is refused once, after the check."""
    source = Source("s", "text", folder_of(tmp_path, {f"{n}.txt": f"text {n}\n".encode() for n in range(30)}))
    source.check(lambda line: None)
    assert len(documents(source, "train")) + len(documents(source, "val")) == 30
    change(tmp_path / "7.txt")
    with pytest.raises(UserError, match="files have changed while they were read; start again .left out 1"):
        for split in ("train", "val"):
            documents(source, split)


# ------------------------------------------------------------------------------------------- copies across the split


def test_copies_of_a_text_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    """40 texts in 8 copies each: without this rule nearly every held-out text is also in the training text."""
    files = {f"{copy}/{n}.txt": f"text {n}\n".encode() * 9 for n in range(40) for copy in "abcdefgh"}
    files |= {f"single/{n}.txt": f"single {n}\n".encode() for n in range(40)}
    source = Source("s", "text", folder_of(tmp_path, files))
    said: list[str] = []
    source.check(said.append)
    train, val = documents(source, "train"), documents(source, "val")
    assert len(train) + len(val) == len(files) and not set(train) & set(val) and not source.held_out.cuts_documents
    assert len(files) / 50 < len(val) < len(files) / 4
    singles = {f"single {n}\n" for n in range(40) if is_held_out(f"single/{n}.txt")}
    assert {text for text in val if text.startswith("single")} == singles  # the rule of the names still decides these
    (line,) = [line for line in said if "copies" in line]
    moved = int(line.split()[1])
    assert moved == 8 * int(line.split("copies of ")[1].split()[0]) > 0
    again = Source("s", "text", tmp_path)
    assert [documents(again, split) for split in ("train", "val")] == [train, val]


def test_of_nothing_but_copies_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(100))
    source = Source("s", "text", folder_of(tmp_path, {f"{n}.txt": text.encode() for n in range(40)}))
    (train,), (val,) = (set(documents(source, split)) for split in ("train", "val"))
    assert train + val == text and val


def test_the_split_of_the_standard_library_keeps_its_two_copies() -> None:
    """Figures of many runs depend on this split."""
    source = Source("pystdlib", "pystdlib", None)
    held_out = [document.key for document in source.every_document(Findings()) if source.held_out.is_held_out(document)]
    assert held_out == [document.key for document in source.every_document(Findings()) if is_held_out(document.key)]


# ------------------------------------------------------------------------------------------------- vocabulary's size


def test_the_size_of_the_vocabulary_is_chosen_from_the_text_and_not_from_its_files(tmp_path: Path) -> None:
    """Notebooks are mostly pictures. The text is read once; a run that names the number finds the same folder."""
    pytest.importorskip("tokenizers")
    code = "".join(f"value_{n} = compute({n * n}) + other_{n % 7}\n" for n in range(500))
    cells = [{"cell_type": "code", "source": code, "outputs": [{"data": {"image/png": "iVBO" * 500_000}}]}]
    folder = folder_of(tmp_path / "mine", {"a.ipynb": json.dumps({"nbformat": 4, "cells": cells}).encode()})
    said: list[str] = []
    data = DataConfig("text", str(folder), {})
    first = open_corpus(data, TokenizerConfig("bpe", "auto", None), tmp_path / "data", said.append).sources[0].folder
    assert first.name.startswith("text-bpe-512-") and sum("reading 1 file" in line for line in said) == 1
    said.clear()
    for size in ("auto", 512):
        found = open_corpus(data, TokenizerConfig("bpe", size, None), tmp_path / "data", said.append).sources[0].folder
        assert found == first and not said
