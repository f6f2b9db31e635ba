"""What is not read although it may be text: what Git ignores, what we wrote ourselves, and other formats. All is named."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from reading import folder_of, read

from andrea.config import DataConfig, TokenizerConfig, UserError
from andrea.text.corpus import open_corpus
from andrea.text.listing import matches, pattern_of

IGNORED = """# comment
*.log
!keep.log
/top.txt
build/
docs/*.txt
**/deep/x.txt
*.py[co]
\\#odd
data/**
!data/a.txt
spaces.txt\x20\x20
sub
"""
NAMES = """a.log keep.log top.txt x/top.txt build/a x/build/b build2/a docs/a.txt docs/x/a.txt x/docs/a.txt deep/x.txt
x/y/deep/x.txt a.pyc a.pyo a.py #odd data/a.txt data/b/c.txt spaces.txt sub/a x/sub inner/a.log inner/b.md inner/keep.log
inner/build/x""".split()


@pytest.mark.skipif(shutil.which("git") is None, reason="Git is the judge")
def test_what_git_ignores_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", {name: name.encode() for name in NAMES})
    (folder / ".gitignore").write_text(IGNORED)
    (folder / "inner" / ".gitignore").write_text("!a.log\n*.md\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    listed = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    expected = subprocess.run(listed, cwd=folder, check=True, capture_output=True, text=True).stdout.split("\0")
    documents, said = read(folder)
    assert sorted(documents) == sorted(name for name in expected if name and not name.endswith(".gitignore"))
    ignored = len(NAMES) - len(documents)
    assert any(line.startswith(f"left out {ignored} (ignored by .gitignore): ") for line in said), said


def test_a_glob_with_many_stars_ends(tmp_path: Path) -> None:
    start = time.monotonic()
    assert not matches([pattern_of("*a" * 40 + "b")], "a" * 250)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("glob", ["[b.txt]", "['b.txt', c.txt]", "[nothing]", "[notes-2.txt,b.txt]"])
def test_a_list_in_place_of_a_glob_is_refused_with_the_words_to_type(tmp_path: Path, option: str, glob: str) -> None:
    folder_of(tmp_path, {name: b"some text" for name in ("a.txt", "b.txt", "c.txt")})
    with pytest.raises(UserError, match=f"data.{option}=.* once for each glob: ") as refused:
        read(tmp_path, **{option: (glob,)})
    typed = str(refused.value).rpartition("each glob: ")[2]
    expected = [part.strip("[]' ") for part in glob.split(",")]
    assert typed == " ".join(f"data.{option}={part}" for part in expected)


def test_a_class_of_characters_that_matches_stays_a_glob(tmp_path: Path) -> None:
    folder_of(tmp_path, {name: name.encode() * 9 for name in ("a", "b", "cc")})
    assert read(tmp_path, exclude=("[ab]",))[0] == ["cc" * 9]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_glob_that_matches_nothing_is_told_also_where_the_text_is_prepared(tmp_path: Path, option: str) -> None:
    root = folder_of(tmp_path / "text", {f"{n}.txt": b"some text %d" % n * 20 for n in range(4)})
    globs = ["*.txt", "absent.md"] if option == "include" else ["absent.md"]
    data = replace(DataConfig("text", str(root), {}), **{option: globs})
    for is_prepared in (False, True):
        open_corpus(data, TokenizerConfig("byte", None, None), tmp_path / "data", (said := []).append)
        assert f"text: 1 glob of data.{option} matched no text file: absent.md" in said
        assert is_prepared == (not any("prepared" in line for line in said))


def test_what_we_wrote_ourselves_is_never_text(tmp_path: Path) -> None:
    """The folder of the text is the working folder: runs/, data/, an export and a page lie beside the text."""
    own = {
        "runs/a/config.yaml": b"x: 1\n", "runs/a/metrics.jsonl": b'{"text": "a"}\n', "runs/a/run.json": b"{}",
        "runs/a/lens/page.html": b"<p>", "runs/sweeps/lr/0.json": b'{"text": "a"}',
        "data/notes-bpe-512-1a/meta.json": b"{}", "data/notes-bpe-512-1a/tokenizer.json": b"{}",
        "data/notes-bpe-512-1a/tokenizer.tiktoken": b"aaaa 1\n", "data/b.partial/tokenizer.json": b"{}",
        "data/python_chat-3.11/train.jsonl": b'{"text": "a"}\n', "data/python_chat-3.11/held_out.jsonl": b'{"text": "a"}\n',
        "data/downloads/shakespeare/input.txt": b"To be", "exported/modeling_andrea.py": b"import torch\n",
        "exported/README.md": b"# card", "copy/manifest.json": b"{}", "copy/state.json": b"{}",
        "compare.html": b'<html><meta name="generator" content="ANDREA"><p>',
    }  # fmt: skip
    theirs = {"config.yaml": b"mine: 1\n", "data/mine.txt": b"my data\n", "notes/run.json": b'{"pace": 5}\n'}
    documents, said = read(folder_of(tmp_path, own | theirs))
    assert sorted(documents) == sorted(text.decode() for text in theirs.values())
    assert any(line.startswith(f"left out {len(own)} (written by ANDREA): ") for line in said), said


def test_packages_and_models_of_others_are_named(tmp_path: Path) -> None:
    files = {
        "a.md": b"text", "node_modules/x/index.js": b"x", "venv/pyvenv.cfg": b"home = /usr", "venv/lib/a.py": b"a = 1",
        "lora/adapter_config.json": b"{}", "lora/adapter_model.safetensors": bytes(9),
        "gpt2/config.json": b"{}", "gpt2/model.safetensors": bytes(9), "gpt2/vocab.json": b"{}",
    }  # fmt: skip
    documents, said = read(folder_of(tmp_path, files))
    assert documents == ["text"]
    assert any(line.startswith("left out 3 (installed packages): ") for line in said), said
    assert any(line.startswith("left out 5 (beside the weights of a model): ") for line in said), said
    assert "1 of 9 files are read" in said


def test_other_formats_are_named_with_what_converts_them(tmp_path: Path) -> None:
    files = {
        "a.txt": b"text", "a.pdf": b"%PDF-1.4\nplain\n", "a.docx": b"PK\3\4\0\0", "a.zip": b"PK\3\4\0\0", "a.rtf": b"{\\rtf1 x}",
        "a.bz2": b"BZh91AY&SY\0", "a.bin": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    }  # fmt: skip
    documents, said = read(folder_of(tmp_path, files))
    assert documents == ["text"] and said[-1] == "1 of 7 files are read"
    for name in ("a.pdf", "a.docx", "a.zip", "a.rtf", "a.bz2", "a.bin"):
        (line,) = [line for line in said if line.endswith(f": {name}")]
        assert any(word in line for word in ("convert", "unpack", "fetch")), line


def test_a_mark_is_no_text_and_utf_16_needs_none(tmp_path: Path) -> None:
    text = "Ça va, 世界\n" * 9
    encodings = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")
    files = {f"{encoding}.txt": text.encode(encoding) for encoding in encodings}
    files |= {
        "a.jsonl": '{"text": "\\ufeffmarked"}\n'.encode("utf-8-sig"),
        "b.gz": gzip.compress(text.encode("utf-8-sig")),
    }
    documents, said = read(folder_of(tmp_path, files))
    assert sorted(documents) == sorted([text] * 6 + ["marked"])
    assert "converted 2 from UTF-16 without a byte-order mark: utf-16-be.txt, utf-16-le.txt" in said


def test_bytes_after_compressed_text_are_left_out_and_named(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(9999)).encode()
    both = gzip.compress(text) + gzip.compress(b"second\n")
    (tmp_path / "a.gz").write_bytes(both + b"trailing")
    (tmp_path / "b.gz").write_bytes(both + bytes(99))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "record"}\n' * 2) + b"trailing")
    documents, said = read(tmp_path)
    assert documents == [(text + b"second\n").decode()] * 2 + ["record"] * 2
    assert "left out the bytes after the compressed text of 2: a.gz, c.jsonl.gz" in said


def test_a_bad_byte_is_named_with_its_place(tmp_path: Path) -> None:
    start = "é line\n" * 300_000  # several blocks
    (tmp_path / "bad.txt").write_bytes(start.encode() + b"ab\xffc\n")
    (tmp_path / "nul.txt").write_bytes(start.encode() + b"a\0\n")
    (tmp_path / "cut.txt").write_bytes(start.encode() + b"\xc3")
    (tmp_path / "good.txt").write_text("good")
    size = len(start.encode())
    said = " ".join(read(tmp_path)[1])
    assert f"bad.txt (at byte {size + 2:,}, in line 300,001)" in said
    assert f"cut.txt (at byte {size:,}, in line 300,001)" in said
    assert f"nul.txt (at byte {size + 1:,}, in line 300,001)" in said
