"""The corpus: prepared once, found again by the same name, and refused where its folder was changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import shut
from preparing import BPE, BYTE, quiet, shards_corpus, small_notes, text_config, write_shard

from andrea.config import DataConfig, SourceConfig, TokenizerConfig, UserError
from andrea.runtime.files import StorageFailed
from andrea.text import corpus
from andrea.text.corpus import VERIFIED, find_held_out, fingerprint_of, folder_of, open_corpus, tokenizer_origin
from andrea.text.download import Remote
from andrea.text.shards import ShardSource, ShardWriter
from andrea.text.sources import Source
from andrea.text.tokenizer import ByteTokenizer, Tokenizer


def test_the_name_of_a_prepared_folder_never_changes(tmp_path: Path) -> None:
    """Another hash would make everyone prepare their data again. Computed by hand: sha256sum of the list as JSON."""
    (tmp_path / "b").mkdir()
    for name, content, time_ns in (("a.py", "one\ntwo\n3", 1_700_000_000_123_456_789), ("b/é.py", "four", 5)):
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, ns=(0, time_ns))
    library, text = Source("lib", "pystdlib", tmp_path), Source("my notes", "text", tmp_path)
    shards = ShardSource("web", "data.path", Path("/tokens"), [], [["/tokens/a.bin", 1034, 7, 8]])

    def name_of(source: Source | ShardSource, config: TokenizerConfig, existing: Tokenizer | None) -> str:
        return folder_of(source, config, tokenizer_origin(config, existing, [source]), Path("data")).as_posix()

    # [1, "pystdlib", [["a.py", 9, 1700000000123456789], ["b/\\u00e9.py", 4, 5]], ["byte-257-40aff2e9"]]
    assert name_of(library, BYTE, ByteTokenizer()) == "data/lib-byte-33ec9753"
    # [1, "text", [["a.py", 9, …, crc32], […], {"name": "my notes", "field": null, "reader": 3}], ["bpe", 300, [[…]]]]
    assert name_of(text, BPE, None) == "data/my_notes-bpe-300-8ed83f66"
    assert name_of(text, BYTE, ByteTokenizer()) == "data/my_notes-byte-55b23beb"
    # [1, "shards", [["/tokens/a.bin", 1034, 7, 8]], ["gpt2"]]
    assert name_of(shards, TokenizerConfig("gpt2", None, None), None) == "data/web-gpt2-e5ca1342"


def mixture(**sources: SourceConfig) -> DataConfig:
    return DataConfig("mixture", None, sources)


def test_a_second_start_prepares_nothing(notes: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = open_corpus(text_config(notes), BPE, tmp_path, said.append)
    assert said
    said.clear()
    second = open_corpus(text_config(notes), BPE, tmp_path, said.append)
    assert not said and second.fingerprint == first.fingerprint
    assert second.tokenizer.identity == first.tokenizer.identity
    assert not list(tmp_path.glob("*.partial"))


def test_held_out_tokens_are_found_by_the_fingerprint_of_their_corpus(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    found = open_corpus(text_config(small_notes(tmp_path / "notes")), BYTE, data_dir, quiet)
    (data_dir / "text-other").mkdir()
    (data_dir / "text-other" / "meta.json").write_text("[]")
    stream = find_held_out(data_dir, found.fingerprint, "text")
    assert stream is not None and np.array_equal(stream[:], found.sources[0].val[:])
    assert find_held_out(data_dir, found.fingerprint, "pystdlib") is None
    assert find_held_out(data_dir, "0" * 64, "text") is None
    folder = found.sources[0].folder
    for path in (folder, folder / "meta.json"):
        path.chmod(0o755)
    for path in (data_dir, folder / "meta.json"):
        with shut(path), pytest.raises(StorageFailed, match="Permission denied"):
            find_held_out(data_dir, found.fingerprint, "text")
    assert find_held_out(tmp_path / "absent", found.fingerprint, "text") is None
    shard = next(found.sources[0].folder.glob("val-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x07\x00")
    with pytest.raises(UserError, match="was changed"):
        find_held_out(data_dir, found.fingerprint, "text")


def test_a_changed_file_is_prepared_again_and_equal_data_has_an_equal_fingerprint(tmp_path: Path) -> None:
    notes = small_notes(tmp_path / "notes")
    first = open_corpus(text_config(notes), BYTE, tmp_path / "data", quiet)
    os.utime(notes / "1.txt", (1, 1))
    touched = open_corpus(text_config(notes), BYTE, tmp_path / "data", quiet)
    assert touched.sources[0].folder != first.sources[0].folder and touched.fingerprint == first.fingerprint
    (notes / "1.txt").write_text("something else\nand more\n")
    assert open_corpus(text_config(notes), BYTE, tmp_path / "data", quiet).fingerprint != first.fingerprint


def test_a_mixture_shares_one_vocabulary(tmp_path: Path) -> None:
    one, two = small_notes(tmp_path / "one"), small_notes(tmp_path / "two", 5)
    data = mixture(a=SourceConfig("text", str(one), 0.3), b=SourceConfig("text", str(two)))
    found = open_corpus(data, BPE, tmp_path / "data", quiet)
    assert [(source.name, source.weight) for source in found.sources] == [("a", 0.3), ("b", None)]
    assert open_corpus(data, BPE, tmp_path / "data", quiet).fingerprint == found.fingerprint
    other_order = mixture(**dict(reversed(data.sources.items())))  # a resumed run reads it from the checkpoint, by name
    again = open_corpus(other_order, BPE, tmp_path / "data", quiet)
    assert again.fingerprint == found.fingerprint and [source.name for source in again.sources] == ["a", "b"]
    (tmp_path / "data" / found.sources[1].folder.name).rename(tmp_path / "gone")
    assert open_corpus(data, BPE, tmp_path / "data", quiet).fingerprint == found.fingerprint
    with pytest.raises(UserError, match=r"data.sources.b.weight"):
        open_corpus(
            mixture(a=SourceConfig("text", str(one), 1.5), b=SourceConfig("text", str(two))), BPE, tmp_path, quiet
        )


def test_existing_shards(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "web_train_000001.bin", [256, *range(97, 120)])
    write_shard(tmp_path / "shards" / "web_train_000002.bin", list(range(40, 50)))
    write_shard(tmp_path / "shards" / "web_val_000000.bin", [256, 65, 66])
    (source,) = shards_corpus(tmp_path).sources
    assert source.train[:].tolist() == [256, *range(97, 120), *range(40, 50)]
    assert source.val[:].tolist() == [256, 65, 66]
    assert (source.train_bytes, source.val_bytes) == (33, 2)
    assert shards_corpus(tmp_path).sources[0].folder == source.folder


def test_of_shards_without_validation_the_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "a.bin", [65] * 500)
    (source,) = shards_corpus(tmp_path).sources
    assert (len(source.train), len(source.val)) == (495, 5)


def test_prepared_data_is_known_by_its_tokenizer(tmp_path: Path) -> None:
    made = open_corpus(text_config(small_notes(tmp_path / "notes")), BPE, tmp_path / "data", quiet)
    data = DataConfig("shards", str(made.sources[0].folder), {})
    with pytest.raises(UserError, match="was made with bpe-300"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)
    again = open_corpus(data, TokenizerConfig("bpe", 300, data.path), tmp_path / "data", quiet)
    assert again.sources[0].val[:].tolist() == made.sources[0].val[:].tolist()


def test_prepared_text_is_read_beside_conversations(tmp_path: Path) -> None:
    """Their tokenizer has the vocabulary of the text, with four tokens at its end."""
    made = open_corpus(text_config(small_notes(tmp_path / "notes")), BPE, tmp_path / "data", quiet)
    folder = str(made.sources[0].folder)
    records = [json.dumps({"prompt": f"{n}", "response": f"{n}"}) for n in range(30)]
    (tmp_path / "talk.jsonl").write_text("\n".join(records))
    data = mixture(talk=SourceConfig("chat", str(tmp_path / "talk.jsonl")), text=SourceConfig("shards", folder))
    found = open_corpus(data, TokenizerConfig("bpe", None, folder), tmp_path / "data", quiet)
    assert found.tokenizer.n_vocab == made.tokenizer.n_vocab + 4
    assert found.sources[1].train[:].tolist() == made.sources[0].train[:].tolist()


@pytest.mark.parametrize("damage", ["{", "{}", None])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str | None) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = open_corpus(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    if damage is None:
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text(damage)
    with pytest.raises(UserError, match="delete the folder"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)


def test_a_truncated_prepared_shard_and_a_foreign_tokenizer_are_named(tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = open_corpus(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "bpe-9-00000000"}))
    with pytest.raises(UserError, match="made with tokenizer bpe-9"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)
    (folder / "meta.json").write_text(json.dumps(meta))
    os.truncate(folder / "train-000000.bin", 1500)
    with pytest.raises(UserError, match="train-000000.bin is damaged"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)


def test_shakespeare_from_a_local_copy_and_from_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = small_notes(tmp_path / "notes", 1) / "0.txt"
    local = open_corpus(DataConfig("shakespeare", str(text), {}), BYTE, tmp_path / "data", quiet)
    monkeypatch.setattr(corpus, "SHAKESPEARE", (Remote("tiny.txt", "http://127.0.0.1:9/tiny.txt", None),))
    with pytest.raises(UserError, match="cannot be downloaded"):
        open_corpus(DataConfig("shakespeare", None, {}), BYTE, tmp_path / "data", quiet)
    (tmp_path / "data" / "downloads" / "shakespeare" / "tiny.txt").write_bytes(text.read_bytes())
    assert (
        open_corpus(DataConfig("shakespeare", None, {}), BYTE, tmp_path / "data", quiet).fingerprint
        == local.fingerprint
    )


def test_what_cannot_be_tokens_of_a_trained_vocabulary_is_refused_before_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "fetch", lambda remote, *_: pytest.fail(f"{remote.name} was asked for"))
    with pytest.raises(UserError, match="data.kind=fineweb_edu holds tokens already; .* tokenizer=gpt2"):
        open_corpus(DataConfig("fineweb_edu", None, {}), BPE, tmp_path, quiet)
    web = SourceConfig("fineweb_edu", None, 1.0)
    with pytest.raises(UserError, match="data.sources.notes.weight is missing"):
        open_corpus(mixture(web=web, notes=SourceConfig("text", str(tmp_path))), BYTE, tmp_path, quiet)


def test_a_shard_swapped_for_another_of_equal_size_is_noticed(tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = open_corpus(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    shard, noted = folder / "train-000000.bin", folder / VERIFIED
    before = noted.read_bytes()
    content, times = bytearray(shard.read_bytes()), shard.stat()
    content[-2] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` leaves it
    with pytest.raises(UserError, match="train-000000.bin was changed.*delete"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)
    content[-2] ^= 1
    shard.write_bytes(content)
    assert open_corpus(data, BYTE, tmp_path / "data", quiet).fingerprint and noted.read_bytes() != before
    noted.write_text("[")
    open_corpus(data, BYTE, tmp_path / "data", quiet)
    shard.unlink()
    with pytest.raises(UserError, match="train-000000.bin cannot be read"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)


def test_a_prepared_token_beyond_the_vocabulary_is_named_whatever_its_checksums_say(tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = open_corpus(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    writer = ShardWriter(folder / "train-000000.bin")
    writer.append(np.array([3, 257, 4]))
    _, digest = writer.close()
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["train"]["shards"][0]["sha256"] = digest
    meta["fingerprint"] = fingerprint_of(meta["tokenizer"], meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="token 257, but the tokenizer has 257"):
        open_corpus(data, BYTE, tmp_path / "data", quiet)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda meta: meta["splits"]["train"]["shards"][0].update(file="../../train-000000.bin"),
            "meta.json was changed",
        ),
        (lambda meta: meta["splits"]["train"]["shards"][0].update(sha256="0"), "meta.json was changed"),
        (lambda meta: meta["splits"]["train"].update(bytes=[None]), "impossible byte counts"),
        (lambda meta: meta["splits"].update(train=None), "meta.json"),
        (lambda meta: meta.update(fingerprint=3), "meta.json was changed"),
    ],
)
def test_a_false_meta_is_refused(damage, said: str, tmp_path: Path) -> None:
    data = text_config(small_notes(tmp_path / "notes"))
    folder = open_corpus(data, BYTE, tmp_path / "data", quiet).sources[0].folder
    meta = json.loads((folder / "meta.json").read_text())
    damage(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=said):
        open_corpus(data, BYTE, tmp_path / "data", quiet)
