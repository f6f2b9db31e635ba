"""Preparing: a folder is whole or not there, and has the same bytes after any kill and from two processes at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from large_vocabulary import FIRST_RARE, N_VOCAB, large_tokenizer, rare_text
from preparing import BPE, BYTE, contents, quiet, shards_corpus, small_notes, text_config, write_shard

from andrea.config import DataConfig, TokenizerConfig, UserError
from andrea.text import corpus, sources
from andrea.text.corpus import open_corpus
from andrea.text.formats import documents_of
from andrea.text.sources import Source


@pytest.mark.parametrize("tokenizer", [BYTE, BPE])
def test_tokens_are_the_text_with_an_end_of_text_before_each_document(notes: Path, tmp_path: Path, tokenizer) -> None:
    found = open_corpus(text_config(notes), tokenizer, tmp_path, quiet)
    (source,) = found.sources
    whole = [*source.train[:], *source.val[:]]
    assert whole.count(found.tokenizer.end_of_text) in (12, 24)  # 12 documents, cut or not
    texts = sorted(path.read_bytes() for path in notes.iterdir())
    for stream, size in ((source.train, source.train_bytes), (source.val, source.val_bytes)):
        assert stream[0:1].tolist() == [found.tokenizer.end_of_text]
        assert found.tokenizer.byte_lengths()[stream[:]].sum() == size
    assert source.train_bytes + source.val_bytes == sum(map(len, texts))


def test_small_shards_hold_the_same_stream(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(sources, "documents_of", lambda file, *rest: read.append(file) or documents_of(file, *rest))
    whole = open_corpus(text_config(notes), BYTE, tmp_path / "a", quiet).sources[0]
    n_read = len(read)
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 7001)
    monkeypatch.setattr(corpus, "GROUP_BYTES", 3001)
    monkeypatch.setattr(corpus, "REPORT_SECONDS", 0.0)
    said: list[str] = []
    parts = open_corpus(text_config(notes), BYTE, tmp_path / "b", said.append).sources[0]
    assert len(list(parts.folder.glob("train-*.bin"))) > 3
    assert len(read) == 2 * n_read  # no file is read again for each shard
    assert np.array_equal(parts.train[:], whole.train[:]) and np.array_equal(parts.val[:], whole.val[:])
    assert any("encoded" in line and "kB" in line for line in said)


def test_ids_of_a_large_vocabulary_are_kept_whole(tmp_path: Path) -> None:
    """Also by someone who reads these shards as they are."""
    text, tokenizer = rare_text(3000), large_tokenizer()
    (tmp_path / "rare.txt").write_text(text)
    tokenizer.save(tmp_path)
    config = TokenizerConfig("bpe", None, str(tmp_path))
    source = open_corpus(text_config(tmp_path / "rare.txt"), config, tmp_path / "data", quiet).sources[0]
    whole = np.concatenate([stream[:] for stream in (source.train, source.val)])
    end = tokenizer.end_of_text
    assert end == N_VOCAB - 1 and tokenizer.decode(token for token in whole.tolist() if token != end) == text
    assert min(whole) >= FIRST_RARE
    shards = DataConfig("shards", str(source.folder), {})
    again = open_corpus(shards, config, tmp_path / "again", quiet).sources[0]
    assert np.array_equal(again.train[:], source.train[:]) and np.array_equal(again.val[:], source.val[:])
    with pytest.raises(UserError, match="holds the token 70000, but the tokenizer has 257"):
        (source.folder / "tokenizer.json").unlink()
        open_corpus(shards, BYTE, tmp_path / "byte", quiet)


def test_the_report_counts_files_and_tokens(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "a.txt").write_text("a line of text\n" * 20)
    open_corpus(text_config(tmp_path / "a.txt"), TokenizerConfig("bpe", 4096, None), tmp_path / "data", said.append)
    assert said[0] == "text: reading 1 file, 300 bytes"
    assert said[1] == "training a vocabulary of 4,096 tokens on 300 bytes"
    assert re.fullmatch(r"the text is too small for 4,096 tokens \(tokenizer.vocab_size\); using 2\d\d", said[2])
    assert said[3] == "the text has only 11 different characters: consider tokenizer=byte, one token for each"
    said.clear()
    open_corpus(text_config(small_notes(tmp_path / "notes")), BYTE, tmp_path / "data", said.append)
    assert said[0] == "text: reading 3 files, 2.1 kB"


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", range(0, 18, 2))
def test_continuing_after_a_stop_ends_with_the_same_bytes(
    notes, tmp_path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The stop is at the n-th write to the disk, and nothing is cleaned up after it."""
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 4001)
    monkeypatch.setattr(corpus, "GROUP_BYTES", 1501)
    uninterrupted = open_corpus(text_config(notes), BPE, tmp_path / "a", quiet).sources[0].folder
    left = [after]

    def dies(write):
        def writes(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            return write(*arguments)

        return writes

    with monkeypatch.context() as patch:
        patch.setattr(corpus.files, "replace_text", dies(corpus.files.replace_text))
        patch.setattr(corpus.ShardWriter, "close", dies(corpus.ShardWriter.close))
        try:
            open_corpus(text_config(notes), BPE, tmp_path / "b", quiet)
        except Stop:
            assert not [path for path in (tmp_path / "b").glob("text-*") if path.suffix != ".partial"]
    folder = open_corpus(text_config(notes), BPE, tmp_path / "b", quiet).sources[0].folder
    assert contents(folder) == contents(uninterrupted)


PROGRAM = """
import sys
from pathlib import Path
from andrea.config import DataConfig, TokenizerConfig
from andrea.text import corpus
from andrea.text.corpus import open_corpus
corpus.SHARD_TOKENS, corpus.GROUP_BYTES = 60_001, 10_001
data = DataConfig("text", sys.argv[1], {})
print(open_corpus(data, TokenizerConfig("bpe", 500, None), Path(sys.argv[2]), lambda line: None).fingerprint)
"""


def start_process(notes: Path, data_dir: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", PROGRAM, str(notes), str(data_dir)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def test_after_a_kill_two_processes_at_once_make_the_same_folder(notes: Path, tmp_path: Path) -> None:
    victim = start_process(notes, tmp_path / "a")
    deadline = time.monotonic() + 60
    while victim.poll() is None and not list(tmp_path.glob("a/*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    both = [start_process(notes, tmp_path / "a") for _ in range(2)]
    alone = start_process(notes, tmp_path / "b")
    fingerprints = [process.communicate(timeout=120)[0] for process in (*both, alone)]
    assert fingerprints[0] and len(set(fingerprints)) == 1 and [p.returncode for p in (*both, alone)] == [0, 0, 0]
    (resumed,), (whole,) = tmp_path.glob("a/text-*"), tmp_path.glob("b/text-*")
    assert resumed.name == whole.name and contents(resumed) == contents(whole)


def test_wrong_shards_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    with pytest.raises(UserError, match="data.path=.*does not exist"):
        shards_corpus(tmp_path)
    folder.mkdir()
    with pytest.raises(UserError, match="holds no .bin file"):
        shards_corpus(tmp_path)
    write_shard(folder / "a.bin", [65] * 9 + [257])
    with pytest.raises(UserError, match="token 257.*tokenizer has 257"):
        shards_corpus(tmp_path)
    with pytest.raises(UserError, match="holds tokens already"):
        shards_corpus(tmp_path, BPE)
    write_shard(folder / "a.bin", [65])
    with pytest.raises(UserError, match="too few tokens"):
        shards_corpus(tmp_path)
    os.truncate(folder / "a.bin", 1025)
    with pytest.raises(UserError, match="damaged"):
        shards_corpus(tmp_path)
    assert not (tmp_path / "data").exists()


def test_too_little_text_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="data.path=.*too little text"):
        open_corpus(text_config(tmp_path / "a.txt"), BYTE, tmp_path / "data", quiet)
    assert list((tmp_path / "data").iterdir()) == []


def test_one_byte_to_train_on_and_one_to_validate_on_are_enough(tmp_path: Path) -> None:
    """Each follows its end_of_text, so that it is a target."""
    (tmp_path / "a.txt").write_text("ab")
    (source,) = open_corpus(text_config(tmp_path / "a.txt"), BYTE, tmp_path / "data", quiet).sources
    assert source.train[:].tolist() == [256, ord("a")] and source.val[:].tolist() == [256, ord("b")]


def test_a_data_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="data_dir="):
        open_corpus(text_config(small_notes(tmp_path / "notes")), BYTE, tmp_path / "file", quiet)


def test_a_full_disk_is_named_without_a_file(tmp_path: Path) -> None:
    """The system's error of a write names no file."""
    with pytest.raises(UserError) as refused, corpus.writing_to(tmp_path, quiet), open("/dev/full", "w") as file:
        file.write("a" * 100_000)
    assert f"data_dir={tmp_path} cannot be used (No space left on device); set data_dir=" in str(refused.value)


def test_a_large_corpus_is_sampled_for_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("s", "text", small_notes(tmp_path / "notes", 40))
    whole = list(corpus.vocabulary_sample([source], source.bytes, set()))
    monkeypatch.setattr(corpus, "BPE_SAMPLE_BYTES", source.bytes // 3)
    part = list(corpus.vocabulary_sample([source], source.bytes, set()))
    assert len(part) == len(whole) // 3 and set(part) <= set(whole) and part[-1] in whole[-3:]
