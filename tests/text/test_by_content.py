"""A folder of text, read by content: every file is read or named as left out, and nothing is read twice."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import BYTE, quiet
from reading import documents, folder_of, read

from andrea.config import DataConfig, SourceConfig, UserError
from andrea.text import encodings
from andrea.text.corpus import open_corpus
from andrea.text.encodings import open_converted, recognise
from andrea.text.listing import matches, pattern_of
from andrea.text.sources import Source


def left_out(said: list[str]) -> int:
    """The number of files that are said to be left out."""
    return sum(int(line.split()[2].replace(",", "")) for line in said if line.startswith("left out"))


def notebook(*cells: tuple[str, str]) -> bytes:
    return json.dumps(
        {
            "nbformat": 4,
            "cells": [
                {
                    "cell_type": kind,
                    "source": text.splitlines(keepends=True),
                    "outputs": [{"data": {"image/png": "iVBO"}}],
                }
                for kind, text in cells
            ],
        }
    ).encode()


def tar_of(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def made_folder(root: Path) -> Path:
    """Text of many kinds, and what is no text; links to a file, to a folder, to nothing, and in a circle."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", "text in an archive\n")
    text = {
        "main.rs": b"fn main() {}\n", "docs/index.rst": b"Title\n=====\n", "paper.tex": b"\\section{A}\n",
        "table.csv": b"a;b\n1;2\n", "page.html": b"<p>x</p>\n", "data.json": b"[1, 2]\n", "Makefile": b"all:\n\tcc a.c\n",
        "mixed.txt": b"one\r\ntwo\rthree\nfour\r\n", "latin.txt": "Ça coûte très cher à l'été.\n".encode("latin-1"),
        "word.txt": "The “size” is 5 € – more or less.\n".encode("cp1252"), "utf16.txt": "žluťoučký kůň\n".encode("utf-16"),
        "log.txt.gz": gzip.compress(b"a line\n" * 9), "analysis.ipynb": notebook(("markdown", "# A\n"), ("code", "x = 1\ny = 2")),
        "big.txt": b"0123456789 abcdefghij\n" * 150_000,
    }  # fmt: skip
    other = {
        "empty.txt": b"", "docs/empty.md": b"", "image.png": b"\x89PNG\r\n\x1a\n\0\0", "lib.so.6": b"\x7fELF\0\1",
        "lib.so": b"\x7fELF\0\2", "archive.zip": packed.getvalue(), "all.tar.gz": tar_of("a.txt", b"text"), "program": bytes(99),
        ".git/config": b"[core]\n", ".git/objects/ab": b"x", ".env": b"KEY=1\n", "damaged.txt": "ééééé".encode() + b"\xff",
        "russian.txt": "Привет, мир\n".encode("koi8-r"), "cut.gz": gzip.compress(bytes(range(97, 120)) * 99)[:40],
        "late.txt": b"text\n" * 2000 + b"\0",
    }  # fmt: skip
    folder_of(root, text | other)
    outside = folder_of(root.with_name(root.name + "-outside"), {"a/more.txt": b"more\n", "b.txt": b"b\n"})
    links = {
        "again.rs": "main.rs", "docs/loop": "..", "docs/self": "self", "gone": "nowhere", "linked": outside, "linked2": outside,
        "inner": outside / "a", "around": root.parent, "docs2": "docs", "only.txt": outside / "b.txt",
    }  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe")
    return root


def test_files_found_are_files_read_and_files_named_as_left_out(tmp_path: Path) -> None:
    documents, said = read(made_folder(tmp_path / "mine"))
    # 14 texts and more.txt, b.txt; 15 other files; the pipe and 8 links: two are followed, to 2 files
    assert len(documents) == 16 and left_out(said) == 15 + 1 + 8
    assert said[-1] == "16 of 40 files are read"
    whole = "".join(documents)
    for text in (
        "Ça coûte très cher à l'été.",
        "The “size” is 5 € – more",
        "žluťoučký kůň",
        "one\r\ntwo\rthree",
        "# A\n\nx = 1\ny = 2\n",
    ):
        assert text in whole
    assert "iVBO" not in whole and "KEY" not in whole and "text in an archive" not in whole
    for line in (
        "converted 1 from Latin-1: latin.txt",
        "converted 1 from Windows-1252: word.txt",
        "converted 1 from UTF-16: utf16.txt",
        "left out 5 (binary): 2 .so, 1 .gz, 1 .png, 1 without an ending",
        "left out 1 (zip archives and office documents; unpack or convert them to text): archive.zip",
        "left out 1 (with a NUL byte, which no text has): late.txt (at byte 10,000, in line 2,001)",
        "left out 3 (hidden): .env, .git/config, .git/objects/ab",
        "left out 2 (empty): docs/empty.md, empty.txt",
        "left out 1 (with damaged UTF-8): damaged.txt (at byte 10, in line 1)",
        "left out 1 (in an unknown encoding; convert to UTF-8): russian.txt",
        "left out 1 (unreadable): cut.gz",
        "left out 1 (neither file nor folder): pipe",
        "left out 2 (broken link): docs/self, gone",
        "left out 2 (link to a folder that contains it): around, docs/loop",
    ):
        assert line in said, said
    assert any(line.startswith("left out 4 (link to a file or folder that is listed already): ") for line in said), said


def test_an_uncut_split_reads_every_document_once(tmp_path: Path) -> None:
    source = Source("s", "text", made_folder(tmp_path / "mine"))
    halves = [*documents(source, "train"), *documents(source, "val")]
    whole = [document.open().read().decode() for document in source.every_document(source.unread.copy())]
    assert sorted(halves) == sorted(whole)


def test_gz_and_converted_text_are_cut_as_the_plain_text_is(tmp_path: Path) -> None:
    text = "".join(f"línea {n}\n" for n in range(300))
    splits = []
    for name, data in (("a", text.encode()), ("b", gzip.compress(text.encode())), ("c", text.encode("latin-1"))):
        (tmp_path / name).write_bytes(data)
        source = Source("s", "text", tmp_path / name)
        splits.append([documents(source, split) for split in ("train", "val")])
    assert splits[0] == splits[1] == splits[2] and splits[0][1][0]


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\3\4\0\0")
    with pytest.raises(
        UserError, match=r"data.path=.*a.zip holds no text file \(left out 1 \(zip archives .*: a.zip\)"
    ):
        Source("s", "text", tmp_path / "a.zip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no text file;"):
        Source("s", "text", tmp_path / "empty")


def test_globs_choose_files_and_say_what_they_leave_out(tmp_path: Path) -> None:
    names = ("a.py", "a.md", "docs/b.md", "docs/deep/c.md", "build/d.py", "x/build/e.py", "src/main.py")
    folder_of(tmp_path, {name: name.encode() for name in names})
    documents, said = read(tmp_path, include=("*.py", "docs/*.md"), exclude=("build/", "*.jpg"))
    assert documents == ["a.py", "docs/b.md", "src/main.py"]
    assert "left out 2 (not matched by data.include): a.md, docs/deep/c.md" in said
    assert "left out 2 (matched by data.exclude): build/d.py, x/build/e.py" in said
    assert "1 glob of data.exclude matched no text file: *.jpg" in said
    with pytest.raises(UserError, match=r"holds no text file \(left out 7 .not matched by data.include"):
        read(tmp_path, include=("*.rs",))


@pytest.mark.parametrize(
    ("glob", "named", "others"),
    [
        ("*.py", ["a.py", "b/c.py"], ["a.pyc", "py"]),
        ("docs", ["docs/a", "x/docs/b/c", "docs"], ["docs2/a", "mydocs"]),
        ("docs/*.md", ["docs/a.md"], ["docs/b/a.md", "x/docs/a.md"]),
        ("docs/**/*.md", ["docs/a.md", "docs/b/c/a.md"], ["a.md"]),
        ("./docs/**", ["docs/a", "docs/b/c"], ["x/docs/a"]),
        ("a?.[xy]", ["ab.x"], ["ab.[x]", "ab.z", "a/.x"]),
        (r"a?.\[x]", ["ab.[x]"], ["ab.x"]),
        ("[!a]*.py[co]", ["b.pyc", "c/bb.pyo"], ["a.pyc", "b.py"]),
        ("/docs", ["docs/a"], ["x/docs/a"]),
        ("[z-a]", ["[z-a]", "x/[z-a]"], ["b", "z"]),
        ("a[!]", ["a[!]"], ["ab"]),
        ("[a&&b|]", ["&", "|"], ["c"]),
        ("*a*b*", ["xaxbx", "ab"], ["ba"]),
        ("", [], ["a"]),
    ],
)
def test_a_glob_names_files_or_folders(glob: str, named: list[str], others: list[str]) -> None:
    assert [name for name in named + others if matches([pattern_of(glob)], name)] == named


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"])), piece=st.integers(4, 29))
def test_any_text_is_recognised_in_pieces_of_any_size(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "PIECE_BYTES", piece)
        for encoding in ("utf-8", "utf-16"):
            form = recognise(lambda encoding=encoding: io.BytesIO(text.encode(encoding)))
            assert (form.encoding, form.size) == (encoding, len(text.encode()))
        assert open_converted(lambda: io.BytesIO(text.encode("utf-16")), "utf-16").read() == text.encode()


def test_a_field_of_the_records_is_read_and_others_are_listed(tmp_path: Path) -> None:
    lines = [{"title": "A", "body": "first"}, {"title": "B"}, {"title": 3, "body": None}, ["x"]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        UserError,
        match=r"left out 3 \(without a field whose name says that it is text\): .*fields found: title, body; .*data.field=…",
    ):
        read(tmp_path)
    documents, said = read(tmp_path, field="body")
    assert documents == ["first"]
    assert (
        'left out 1 (without the field "body"): a.jsonl#1 (fields found: title; choose one with data.field=…)' in said
    )
    assert "left out 1 (empty): a.jsonl#2" in said
    assert 'left out 1 (the field "title" is not text): a.jsonl#2' in read(tmp_path, field="title")[1]
    assert "left out 1 (records that are no JSON object): a.jsonl#3" in said
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "packed"}\n'))
    assert read(tmp_path, field="body")[0] == ["first", "packed"]


CONVERSATION = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "Good day"}, {"type": "image"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
]


def test_conversations_are_recognised(tmp_path: Path) -> None:
    unknown = [{"role": "user", "content": {"parts": ["Hello"]}}, CONVERSATION[1]]
    lines = [{"messages": CONVERSATION}, {"messages": []}, {"messages": [1]}, {"messages": [], "text": "plain"}]
    lines += [{"messages": unknown}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    documents, said = read(tmp_path)
    assert documents == ["user: Hello\n\nassistant: Good day\n", "plain"]
    assert "left out 1 (empty): a.jsonl#1" in said
    assert 'left out 2 (the field "messages" is not text): a.jsonl#2, a.jsonl#4' in said


def test_parquet_is_read_by_field_and_as_conversations(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    turns = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": turns, "body": ["one", "two"]}), tmp_path / "a.bin")
    assert read(tmp_path)[0] == ["user: Hi\n", "user: Ho\n"]
    assert read(tmp_path, field="body")[0] == ["one", "two"]


def test_what_is_no_notebook_is_read_as_it_is(tmp_path: Path) -> None:
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["a\n", "b"]}, {"source": "# c"}]}]}
    half = b'{"cells": [{"source": "half an emoji: \\ud83d"}]}'
    folder_of(
        tmp_path,
        {"a.ipynb": json.dumps(old).encode(), "b.ipynb": b"not JSON", "c.ipynb": b'{"cells": []}', "d.ipynb": half},
    )
    documents, said = read(tmp_path)
    assert documents == ["a\nb\n\n# c\n", "not JSON", "half an emoji: ?\n"] and "left out 1 (empty): c.ipynb" in said


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files there are UTF-8")
def test_a_name_that_is_not_utf_8_is_said_on_one_line(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff\nb")).write_bytes(b"")
    (tmp_path / "c").write_bytes(b"text")
    assert read(tmp_path)[1][1] == r"left out 1 (empty): a\udcff\nb"


# ------------------------------------------------------------------------------------------------ the prepared folder


def text_of(path: Path, **keys: object) -> DataConfig:
    return DataConfig("text", str(path), {}, **keys)


def prepared(data: DataConfig, data_dir: Path) -> Path:
    return open_corpus(data, BYTE, data_dir, quiet).sources[0].folder


def test_what_is_read_decides_the_folder(tmp_path: Path) -> None:
    """A binary file that changes, as a compiled one does, changes nothing; the field and the globs do."""
    notes, data_dir = tmp_path / "notes", tmp_path / "data"
    folder_of(
        notes, {"a.rs": b"fn a() {}\n" * 9, "b.jsonl": b'{"text": "t t t t", "body": "b b b b"}\n', "c.pyc": b"\0"}
    )
    first = prepared(text_of(notes), data_dir)
    (notes / "c.pyc").write_bytes(b"\0\0")
    assert prepared(text_of(notes), data_dir) == first
    others = {prepared(text_of(notes, **keys), data_dir) for keys in ({"field": "body"}, {"exclude": ["*.jsonl"]})}
    assert len(others | {first}) == 3


def test_names_that_differ_in_a_space_have_folders_of_their_own(tmp_path: Path) -> None:
    sources = {}
    for name, content in (("a b", b"first text\n"), ("a_b", b"other text\n")):
        folder_of(tmp_path / name, {"x.txt": b"#" * 5000 + b"\n" + content * 9})
        os.utime(tmp_path / name / "x.txt", ns=(7, 7))
        sources[name] = SourceConfig("text", str(tmp_path / name))
    found = open_corpus(DataConfig("mixture", None, sources), BYTE, tmp_path / "data", quiet).sources
    assert found[0].folder != found[1].folder
    texts = [bytes(source.val[1:].astype("uint8").tolist()) for source in found]
    assert b"first" in texts[0] and b"other" in texts[1]
    assert re.fullmatch(r"a_b-byte-[0-9a-f]{8}", found[1].folder.name)


def test_a_compressed_file_that_would_fill_the_disk_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = "".join(f"line {number} of a log\n" for number in range(5000)).encode()
    files = {"a.txt": b"text\n", "log.gz": gzip.compress(ordinary), "bomb.gz": gzip.compress(bytes([97]) * 2_000_000)}
    documents, said = read(folder_of(tmp_path / "mine", files))
    assert sorted(map(len, documents)) == [5, len(ordinary)]
    assert "left out 1 (expands to more than 200 times its size, which text hardly ever does): bomb.gz" in said


def test_a_notebook_too_large_for_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea.text.formats.LARGEST_NOTEBOOK_BYTES", 1000)
    files = {"small.ipynb": notebook(("code", "x = 1")), "large.ipynb": notebook(("code", "x = 1\n" * 500))}
    documents, said = read(folder_of(tmp_path / "mine", files))
    assert documents == ["x = 1\n"] and "left out 1 (notebooks of more than 1.0 kB): large.ipynb" in said
