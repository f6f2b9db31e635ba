"""Folders of text: is every file either read or named as left out? Real folders of this system, and made ones.

    python bench/folders.py

Files are counted a second time without the package. The vocabulary is the size that tokenizer.vocab_size=auto chooses, and
a made folder must give the documents that it was made of. Exit code 1 if a count differs.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from common import ROOT

sys.path.insert(0, str(ROOT))

from andrea.config import UserError
from andrea.text.sources import Source
from andrea.text.tokenizer import vocabulary_for

REAL = (
    "/etc", "/usr/include", "/usr/share/perl", "/usr/share/doc", "/usr/share/man", "/usr/share/misc", "/usr/share/bash-completion",
    "/usr/share/zoneinfo", "/usr/share/icons", "/usr/share/fonts", "/usr/lib/python3", "/usr/share/common-licenses",
    "/var/lib/dpkg",
    "/usr/share/applications", "/usr/share/perl5", "/usr/share/X11",
)  # fmt: skip
MOST_REAL = 10
MOST_FILES = 8_000  # of a real folder: larger ones take minutes
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew".split()


def words(size: int, seed: int = 1) -> str:
    """Ordinary text of about `size` characters."""
    chosen = random.Random(seed)
    return "\n".join(" ".join(chosen.choices(WORDS, k=12)) for _ in range(size // 60 + 1)) + "\n"


# ------------------------------------------------------------------------------------------------------ made folders


def latin_1(root: Path) -> None:
    (root / "french.txt").write_bytes("Ça coûte très cher à l'été, déjà.\n".encode("latin-1") * 30)
    (root / "word.txt").write_bytes("The “size” is 5 € – more\n".encode("cp1252") * 30)
    (root / "russian.txt").write_bytes("Привет, мир, как дела\n".encode("cp1251") * 30)
    (root / "utf16.txt").write_text(words(500), encoding="utf-16")


def line_endings(root: Path) -> None:
    for name, ending in (("unix", "\n"), ("dos", "\r\n"), ("mac", "\r"), ("mixed", "\r\n\r\n\n\r")):
        (root / f"{name}.txt").write_bytes(words(2000).replace("\n", ending).encode())
    (root / "none.txt").write_text("no end of line")


def links(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "x.txt").write_text(words(500))
    (root / "outside").mkdir()
    for name, target in {
        "loop": ".", "a/up": "..", "a/b/far": "../../a", "self": "self", "one": "two", "two": "one", "gone": "nowhere",
        "copy.txt": "a/x.txt", "again": "a",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)


def notebooks(root: Path) -> None:
    cells = [{"cell_type": "code", "source": ["x = 1\n", "y = 2"], "outputs": [{"data": {"image/png": "iVBO" * 9}}]}]
    (root / "one.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    (root / "old.ipynb").write_text(json.dumps({"worksheets": [{"cells": [{"input": "print 1"}]}]}))
    (root / "empty.ipynb").write_text(json.dumps({"cells": []}))
    (root / "broken.ipynb").write_text('{"cells": [')
    (root / "deep.ipynb").write_text("[" * 50_000)


def large(root: Path) -> None:
    block = words(1 << 20)
    with open(root / "large.txt", "w") as file:
        for _ in range(50):
            file.write(block)
    (root / "one-line.txt").write_text("word " * 1_000_000)


def archives(root: Path) -> None:
    with zipfile.ZipFile(root / "a.zip", "w") as archive:
        archive.writestr("a.txt", words(5000))
    (root / "a.txt.gz").write_bytes(gzip.compress(words(5000).encode()))
    (root / "cut.gz").write_bytes(gzip.compress(words(5000).encode())[:200])
    (root / "bomb.gz").write_bytes(gzip.compress(b"a" * 20_000_000))
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (root / "a.txt").write_text(words(500))


def empty(root: Path) -> None:
    (root / "nothing" / "at" / "all").mkdir(parents=True)
    (root / "empty.txt").touch()
    (root / ".hidden").write_text("hidden")


def names(root: Path) -> None:
    for name in (b"a#1.txt", b"new\nline.txt", b"\xff\xfe.txt", "é ".encode(), b"-", b"*", b"x" * 250, b"\x1b[2J"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_text(words(300))
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")


def records(root: Path) -> None:
    lines = ['{"text": "one"}', '{"other": "two"}', "no json", "[" * 50_000, '{"text": 3}', ""]
    (root / "a.jsonl").write_text("\n".join(lines))
    (root / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    (root / "none.jsonl").write_text('{"other": 1}\n')
    (root / "table.csv").write_text("a,b\n1,2\n" * 50)


def special(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "zeros").symlink_to("/dev/zero")
    (root / "nul.txt").write_bytes(b"text\0text\n" * 99)
    (root / "late.txt").write_bytes(words(9000).encode() + b"\0\0\0")
    (root / "cut.txt").write_bytes(("é" * 999).encode()[:-1])
    (root / "code.py").write_text("x = 1\n")


def instructions(root: Path) -> None:
    """ShareGPT, alpaca, prompt and completion: 9 records of each."""
    talk = [{"from": "human", "value": words(60)}, {"from": "gpt", "value": words(200)}]
    alpaca = {"instruction": words(60), "input": "", "output": words(200)}
    (root / "sharegpt.json").write_text(json.dumps([{"id": n, "conversations": talk} for n in range(9)]))
    (root / "alpaca.json").write_text(json.dumps([alpaca] * 9, indent=1))
    (root / "alpaca.jsonl").write_text((json.dumps(alpaca) + "\n") * 9)
    completions = [{"prompt": words(60, n), "completion": words(200, n)} for n in range(9)]
    (root / "completion.jsonl").write_text("".join(json.dumps(each) + "\n" for each in completions))


def tables(root: Path) -> None:
    """A table with the column text (9 rows), one with a question and its answer (9), and one without such a column (1)."""
    rows = [(n, words(300, n), f"{n}") for n in range(9)]
    for name, delimiter, header in (
        ("text.csv", ",", ("id", "text", "n")),
        ("question.tsv", "\t", ("question", "answer", "n")),
        ("other.csv", ";", ("id", "title", "n")),
    ):
        with open(root / name, "w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([header, *rows])


def project(root: Path) -> None:
    """3 files of a project: Git ignores others, and ANDREA and npm wrote others."""
    (root / ".gitignore").write_text("*.log\nbuild/\n")
    for name in (
        "a.md", "src/a.js", "src/keep.txt", "src/a.log", "build/out.txt", "node_modules/x/a.js", "runs/a/config.yaml",
        "runs/a/metrics.jsonl", "data/mine-bpe-512-0/meta.json", "data/mine-bpe-512-0/tokenizer.json",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(words(400))


def utf_16(root: Path) -> None:
    for encoding in ("utf-16-le", "utf-16-be", "utf-16", "utf-8-sig"):
        (root / f"{encoding}.txt").write_bytes(words(3000).encode(encoding))


def dna(root: Path) -> None:
    chosen = random.Random(1)
    lines = ("".join(chosen.choices("ACGT", k=60)) for _ in range(20_000))
    (root / "genome.fa").write_text(">chromosome\n" + "\n".join(lines) + "\n")


def many_notebooks(root: Path) -> None:
    """1.4 MB of files with about 22 kB of text."""
    for n in range(12):
        picture = {"data": {"image/png": "iVBORw0K" * 14_000}}
        cell = {"cell_type": "code", "source": [words(1800, n)], "outputs": [picture]}
        (root / f"{n}.ipynb").write_text(json.dumps({"nbformat": 4, "cells": [cell]}))


def chess(root: Path) -> None:
    moves = "e4 e5 Nf3 Nc6 Bb5 a6 O-O Nf6 d4 exd4 Re1 Be7 Qxd4 Rb8 Bxc6 dxc6".split()
    chosen = random.Random(1)
    for n in range(40):
        game = " ".join(f"{k}. {chosen.choice(moves)} {chosen.choice(moves)}" for k in range(1, 60))
        (root / f"{n}.pgn").write_text(f'[Event "Open"]\n[Round "{n}"]\n[Result "1-0"]\n\n{game} 1-0\n\n')


DOCUMENTS = {  # of the made folders that are read by form: how many documents they were made of
    "instructions": 36, "tables": 19, "project": 3, "utf_16": 4, "dna": 1, "many_notebooks": 12, "chess": 40,
}  # fmt: skip
MADE: tuple[Callable[[Path], None], ...] = (
    latin_1, line_endings, links, notebooks, large, archives, empty, names, records, special,
    instructions, tables, project, utf_16, dna, many_notebooks, chess,
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- the two counts


def count_again(root: Path) -> int:
    """Files under `root`, counted by their real paths: links to folders are followed last, and each folder once."""
    around = {root.resolve(), *root.resolve().parents}
    walked: set[Path] = set()

    def walk(folder: Path, hidden: bool) -> tuple[int, list[tuple[str, Path, bool]]]:
        if folder.resolve() in walked:
            return 0, []
        count, found = 0, []
        if not hidden:
            walked.add(folder.resolve())
        for entry in os.scandir(folder):
            path, is_hidden = folder / entry.name, hidden or entry.name.startswith(".")
            if entry.is_symlink() and not is_hidden:
                found.append((str(path.relative_to(root)), path, is_hidden))
            elif entry.is_dir(follow_symlinks=False):
                more, others = walk(path, is_hidden)
                count, found = count + more, found + others
            else:
                count += 1
        return count, found

    total, waiting = walk(root, False)
    while waiting:
        found, waiting = sorted(waiting), []
        for _, path, is_hidden in found:
            try:
                is_new_folder = path.is_dir() and path.resolve() not in around | walked
            except (OSError, RuntimeError):  # a loop of links
                is_new_folder = False
            more, others = walk(path, is_hidden) if is_new_folder else (1, [])
            total, waiting = total + more, waiting + others
    return total


def count_by_program(root: Path) -> tuple[int, int, int, int, str]:
    """Files read, files named as left out, documents, bytes of text, and the text of a refusal."""
    said: list[str] = []
    try:
        source = Source("s", "text", root)
        findings = source.unread.copy()
        documents = list(source.every_document(findings))
    except UserError as error:
        said = re.findall(r"left out ([\d,]+)", str(error))
        return 0, sum(int(number.replace(",", "")) for number in said), 0, 0, "refused: no text"
    keys = [document.key for document in documents]
    files = {entry[0] for entry in source.listing}
    with_text = {key if key in files else key.rpartition("#")[0] for key in keys}
    of_lines = {name for name in files - with_text if name.endswith((".jsonl", ".ndjson"))}  # all lines are named
    n_byte = sum(document.size for document in documents)
    return len(with_text | of_lines), findings.n_file_left_out, len(keys), n_byte, ""


def check(name: str, root: Path) -> bool:
    started = time.monotonic()
    found = count_again(root)
    read, left_out, documents, n_byte, note = count_by_program(root)
    fits = found == read + left_out and documents == DOCUMENTS.get(root.name, documents)
    seconds = time.monotonic() - started
    figures = f"{found:8,}{read:8,}{left_out:10,}{documents:11,}{vocabulary_for(n_byte):12,}{seconds:9.1f}"
    print(f"{name:28}{figures}  {'' if fits else 'DIFFERS'} {note}".rstrip(), flush=True)
    return fits


def main() -> None:
    print(f"{'folder':28}{'found':>8}{'read':>8}{'left out':>10}{'documents':>11}{'vocabulary':>12}{'seconds':>9}")
    fits = []
    real = [Path(name) for name in REAL if os.path.isdir(name)]
    for folder in [path for path in real if sum(len(files) for _, _, files in os.walk(path)) <= MOST_FILES][:MOST_REAL]:
        fits.append(check(str(folder), folder))
    with tempfile.TemporaryDirectory() as place:
        for make in MADE:
            (Path(place) / make.__name__).mkdir()
            make(Path(place) / make.__name__)
            fits.append(check(f"made: {make.__name__}", Path(place) / make.__name__))
    print(f"{sum(fits)} of {len(fits)} folders: files found = files read + files named as left out")
    sys.exit(0 if all(fits) else 1)


if __name__ == "__main__":
    main()
