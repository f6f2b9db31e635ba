"""Preparing: whole or not at all, found again, the same bytes after any kill and from two processes at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from andrea.config import DataConfig, SourceConfig, TokenizerConfig, UserError
from andrea.text import corpus as prepare_module
from andrea.text import prepare as encode
from andrea.text.corpus import VERIFIED, Corpus, prepare
from andrea.text.download import Remote
from andrea.text.prepare import fingerprint_of
from andrea.text.shards import ShardWriter
from andrea.text.sources import Source

BYTE, BPE = TokenizerConfig("byte", None, None), TokenizerConfig("bpe", 300, None)


def quiet(line: str) -> None:
    assert "\n" not in line


def text_config(path: Path) -> DataConfig:
    return DataConfig("text", str(path), {})


def contents(folder: Path) -> dict[str, bytes]:
    """What was made; verified.json holds times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != VERIFIED}


def shard(path: Path, tokens: list[int]) -> None:
    writer = ShardWriter(path)
    writer.append(np.array(tokens, dtype=np.uint16))
    writer.close()


def small_notes(folder: Path, count: int = 3) -> Path:
    folder.mkdir()
    for n in range(count):
        (folder / f"{n}.txt").write_text("".join(f"line {i} of note {n}\n" for i in range(40)))
    return folder


@pytest.mark.parametrize("tokenizer", [BYTE, BPE])
def test_tokens_are_the_text_with_an_end_of_text_before_each_document(notes: Path, tmp_path: Path, tokenizer) -> None:
    found = prepare(text_config(notes), tokenizer, tmp_path, quiet)
    (source,) = found.sources
    whole = [*source.train[:], *source.val[:]]
    assert whole.count(found.tokenizer.end_of_text) in (12, 24)  # 12 documents, cut or not
    texts = sorted(path.read_bytes() for path in notes.iterdir())
    for stream, size in ((source.train, source.train_bytes), (source.val, source.val_bytes)):
        assert stream[0:1].tolist() == [found.tokenizer.end_of_text]
        assert found.tokenizer.byte_lengths()[stream[:]].sum() == size
    assert source.train_bytes + source.val_bytes == sum(map(len, texts))


def test_a_second_start_only_looks(notes: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare(text_config(notes), BPE, tmp_path, said.append)
    assert said
    said.clear()
    second = prepare(text_config(notes), BPE, tmp_path, said.append)
    assert not said and second.fingerprint == first.fingerprint
    assert second.tokenizer.identity == first.tokenizer.identity
    assert not list(tmp_path.glob("*.partial"))


def test_a_changed_file_is_prepared_anew_and_equal_data_has_an_equal_fingerprint(tmp_path: Path) -> None:
    notes = small_notes(tmp_path / "notes")
    first = prepare(text_config(notes), BYTE, tmp_path / "data", quiet)
    os.utime(notes / "1.txt", (1, 1))
    touched = prepare(text_config(notes), BYTE, tmp_path / "data", quiet)
    assert touched.sources[0].folder != first.sources[0].folder and touched.fingerprint == first.fingerprint
    (notes / "1.txt").write_text("something else\nand more\n")
    assert prepare(text_config(notes), BYTE, tmp_path / "data", quiet).fingerprint != first.fingerprint


def test_small_shards_hold_the_same_stream(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(text_config(notes), BYTE, tmp_path / "a", quiet).sources[0]
    monkeypatch.setattr(encode, "SHARD_TOKENS", 7001)
    monkeypatch.setattr(encode, "GROUP_BYTES", 3001)
    monkeypatch.setattr(encode, "REPORT_SECONDS", 0.0)
    said: list[str] = []
    parts = prepare(text_config(notes), BYTE, tmp_path / "b", said.append).sources[0]
    assert len(list(parts.folder.glob("train-*.bin"))) > 3
    assert np.array_equal(parts.train[:], whole.train[:]) and np.array_equal(parts.val[:], whole.val[:])
    assert any("encoded" in line and "MB" in line for line in said)


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", range(0, 18, 2))
def test_going_on_after_a_stop_ends_with_the_same_bytes(
    notes, tmp_path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stops at the n-th time something is put on the disk, without any tidying up."""
    monkeypatch.setattr(encode, "SHARD_TOKENS", 4001)
    monkeypatch.setattr(encode, "GROUP_BYTES", 1501)
    undisturbed = prepare(text_config(notes), BPE, tmp_path / "a", quiet).sources[0].folder
    left = [after]

    def dies(write):
        def writes(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            return write(*arguments)

        return writes

    with monkeypatch.context() as patch:
        patch.setattr(encode, "replace_text", dies(encode.replace_text))
        patch.setattr(encode.ShardWriter, "close", dies(encode.ShardWriter.close))
        try:
            prepare(text_config(notes), BPE, tmp_path / "b", quiet)
        except Stop:
            assert not [path for path in (tmp_path / "b").glob("text-*") if path.suffix != ".partial"]
    folder = prepare(text_config(notes), BPE, tmp_path / "b", quiet).sources[0].folder
    assert contents(folder) == contents(undisturbed)


PROGRAM = """
import sys
from pathlib import Path
from andrea.config import DataConfig, TokenizerConfig
from andrea.text import prepare as encode
from andrea.text.corpus import prepare
encode.SHARD_TOKENS, encode.GROUP_BYTES = 60_001, 10_001
data = DataConfig("text", sys.argv[1], {})
print(prepare(data, TokenizerConfig("bpe", 500, None), Path(sys.argv[2]), lambda line: None).fingerprint)
"""


def start_process(notes: Path, data_dir: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", PROGRAM, str(notes), str(data_dir)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_and_two_at_once(notes: Path, tmp_path: Path) -> None:
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


def mixture(**sources: SourceConfig) -> DataConfig:
    return DataConfig("mixture", None, sources)


def test_a_mixture_shares_one_vocabulary(tmp_path: Path) -> None:
    one, two = small_notes(tmp_path / "one"), small_notes(tmp_path / "two", 5)
    data = mixture(a=SourceConfig("text", str(one), 0.3), b=SourceConfig("text", str(two)))
    found = prepare(data, BPE, tmp_path / "data", quiet)
    assert [(source.name, source.weight) for source in found.sources] == [("a", 0.3), ("b", None)]
    assert prepare(data, BPE, tmp_path / "data", quiet).fingerprint == found.fingerprint
    (tmp_path / "data" / found.sources[1].folder.name).rename(tmp_path / "gone")
    assert prepare(data, BPE, tmp_path / "data", quiet).fingerprint == found.fingerprint
    with pytest.raises(UserError, match=r"data.sources.b.weight"):
        prepare(mixture(a=SourceConfig("text", str(one), 1.5), b=SourceConfig("text", str(two))), BPE, tmp_path, quiet)


def shards_corpus(tmp_path: Path, tokenizer: TokenizerConfig = BYTE) -> Corpus:
    return prepare(DataConfig("shards", str(tmp_path / "shards"), {}), tokenizer, tmp_path / "data", quiet)


def test_existing_shards(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "web_train_000001.bin", [256, *range(97, 120)])
    shard(tmp_path / "shards" / "web_train_000002.bin", list(range(40, 50)))
    shard(tmp_path / "shards" / "web_val_000000.bin", [256, 65, 66])
    (source,) = shards_corpus(tmp_path).sources
    assert source.train[:].tolist() == [256, *range(97, 120), *range(40, 50)] and source.val[:].tolist() == [
        256,
        65,
        66,
    ]
    assert (source.train_bytes, source.val_bytes) == (33, 2)
    assert shards_corpus(tmp_path).sources[0].folder == source.folder


def test_shards_without_validation_give_their_end(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "a.bin", [65] * 500)
    (source,) = shards_corpus(tmp_path).sources
    assert (len(source.train), len(source.val)) == (495, 5)


def test_wrong_shards_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    with pytest.raises(UserError, match="data.path=.*does not exist"):
        shards_corpus(tmp_path)
    folder.mkdir()
    with pytest.raises(UserError, match="holds no .bin file"):
        shards_corpus(tmp_path)
    shard(folder / "a.bin", [65] * 9 + [257])
    with pytest.raises(UserError, match="token 257.*byte-257"):
        shards_corpus(tmp_path)
    with pytest.raises(UserError, match="holds tokens already"):
        shards_corpus(tmp_path, BPE)
    shard(folder / "a.bin", [65])
    with pytest.raises(UserError, match="too few tokens"):
        shards_corpus(tmp_path)
    os.truncate(folder / "a.bin", 1025)
    with pytest.raises(UserError, match="damaged"):
        shards_corpus(tmp_path)
    assert not (tmp_path / "data").exists()


def test_prepared_data_is_known_by_its_tokenizer(tmp_path: Path) -> None:
    made = prepare(text_config(small_notes(tmp_path / "notes")), BPE, tmp_path / "data", quiet)
    data = DataConfig("shards", str(made.sources[0].folder), {})
    with pytest.raises(UserError, match="was made with bpe-300"):
        prepare(data, BYTE, tmp_path / "data", quiet)
    again = prepare(data, TokenizerConfig("bpe", 300, data.path), tmp_path / "data", quiet)
    assert again.sources[0].val[:].tolist() == made.sources[0].val[:].tolist()


@pytest.mark.parametrize("damage", ["{", "{}", None])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str | None) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = prepare(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    if damage is None:
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text(damage)
    with pytest.raises(UserError, match="delete the folder"):
        prepare(data, BYTE, tmp_path / "data", quiet)


def test_a_truncated_prepared_shard_and_a_foreign_tokenizer_are_named(tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = prepare(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "bpe-9-00000000"}))
    with pytest.raises(UserError, match="made with bpe-9"):
        prepare(data, BYTE, tmp_path / "data", quiet)
    (folder / "meta.json").write_text(json.dumps(meta))
    os.truncate(folder / "train-000000.bin", 1500)
    with pytest.raises(UserError, match="train-000000.bin is damaged"):
        prepare(data, BYTE, tmp_path / "data", quiet)


def test_too_little_text_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="data.path=.*too little text"):
        prepare(text_config(tmp_path / "a.txt"), BYTE, tmp_path / "data", quiet)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_data_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="data_dir="):
        prepare(text_config(small_notes(tmp_path / "notes")), BYTE, tmp_path / "file", quiet)


def test_a_large_corpus_is_sampled_for_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("s", "text", small_notes(tmp_path / "notes", 40))
    whole = list(encode.sample([source], source.bytes))
    monkeypatch.setattr(encode, "BPE_SAMPLE_BYTES", source.bytes // 3)
    part = list(encode.sample([source], source.bytes))
    assert len(part) == len(whole) // 3 and set(part) <= set(whole) and part[-1] in whole[-3:]


def test_shakespeare_from_a_local_copy_and_from_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = small_notes(tmp_path / "notes", 1) / "0.txt"
    local = prepare(DataConfig("shakespeare", str(text), {}), BYTE, tmp_path / "data", quiet)
    monkeypatch.setattr(prepare_module, "SHAKESPEARE", (Remote("tiny.txt", "http://127.0.0.1:9/tiny.txt", None),))
    with pytest.raises(UserError, match="cannot be downloaded"):
        prepare(DataConfig("shakespeare", None, {}), BYTE, tmp_path / "data", quiet)
    (tmp_path / "data" / "downloads" / "shakespeare" / "tiny.txt").write_bytes(text.read_bytes())
    assert prepare(DataConfig("shakespeare", None, {}), BYTE, tmp_path / "data", quiet).fingerprint == local.fingerprint


def test_a_shard_swapped_for_another_of_equal_size_is_noticed(tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = prepare(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    shard, noted = folder / "train-000000.bin", folder / VERIFIED
    before = noted.read_bytes()
    content, times = bytearray(shard.read_bytes()), shard.stat()
    content[-2] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` leaves it
    with pytest.raises(UserError, match="train-000000.bin was changed.*delete"):
        prepare(data, BYTE, tmp_path / "data", quiet)
    content[-2] ^= 1
    shard.write_bytes(content)
    assert prepare(data, BYTE, tmp_path / "data", quiet).fingerprint and noted.read_bytes() != before
    noted.write_text("[")
    prepare(data, BYTE, tmp_path / "data", quiet)
    shard.unlink()
    with pytest.raises(UserError, match="train-000000.bin cannot be read"):
        prepare(data, BYTE, tmp_path / "data", quiet)


def test_a_prepared_token_beyond_the_vocabulary_is_named_whatever_its_checksums_say(tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = prepare(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    writer = ShardWriter(folder / "train-000000.bin")
    writer.append(np.array([3, 257, 4]))
    _, digest = writer.close()
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["train"]["shards"][0]["sha256"] = digest
    meta["fingerprint"] = fingerprint_of(meta["tokenizer"], meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="token 257, but its tokenizer has 257"):
        prepare(data, BYTE, tmp_path / "data", quiet)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda meta: meta["splits"]["train"]["shards"][0].update(file="../../train-000000.bin"),
            "not as it was written",
        ),
        (lambda meta: meta["splits"]["train"]["shards"][0].update(sha256="0"), "not as it was written"),
        (lambda meta: meta["splits"]["train"].update(bytes=[None]), "bytes of text"),
        (lambda meta: meta["splits"].update(train=None), "meta.json"),
        (lambda meta: meta.update(fingerprint=3), "not as it was written"),
    ],
)
def test_a_meta_that_lies_is_refused(damage, said: str, tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = prepare(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    meta = json.loads((folder / "meta.json").read_text())
    damage(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=said):
        prepare(data, BYTE, tmp_path / "data", quiet)
