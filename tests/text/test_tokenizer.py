"""Tokenizers: decoding restores the text, a saved one loads, a damaged file is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from large_vocabulary import FIRST_RARE, N_VOCAB, large_tokenizer, rare_text

from andrea.config import TokenizerConfig, UserError
from andrea.text.load_tokenizer import configured_tokenizer, load_gpt2, load_tokenizer
from andrea.text.tokenizer import BLOCK_CHARACTERS, ByteTokenizer, RankTokenizer, train_bpe, visible_bytes

TEXTS = [
    "def main(self):\n    return self.value\n" * 7,
    "the cat sat on the mat, and the hat\n" * 11,
    "привет, мир 12345\n" * 5,
]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
OF_ANOTHER_MODEL = {
    "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True} | dict.fromkeys(FLAGS, False)],
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": visible_bytes(), "merges": []},
}
CACHE = Path(__file__).parents[3] / "shared" / "data" / "tiktoken-cache"
needs_cache = pytest.mark.skipif(not CACHE.exists(), reason="GPT-2's vocabulary is not in a folder next to the project")


@pytest.fixture(scope="module")
def bpe() -> RankTokenizer:
    return train_bpe(TEXTS, 311)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: RankTokenizer) -> ByteTokenizer | RankTokenizer:
    return bpe if request.param == "bpe" else ByteTokenizer()


def test_sizes(bpe: RankTokenizer) -> None:
    assert (bpe.n_vocab, bpe.end_of_text, bpe.kind) == (311, 310, "bpe")
    assert (ByteTokenizer().n_vocab, ByteTokenizer().end_of_text) == (257, 256)
    assert bpe.identity.startswith("bpe-311-") and len(bpe.identity) == len("bpe-311-") + 8


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_decoding_restores_any_text(text: str) -> None:
    for tokenizer in (ByteTokenizer(), _trained()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert sum(tokenizer.byte_lengths()[ids]) == len(text.encode())


def _trained(kept: list[RankTokenizer] = []) -> RankTokenizer:  # noqa: B006 (hypothesis takes no module fixture)
    if not kept:
        kept.append(train_bpe(TEXTS, 311))
    return kept[0]


def test_merges_shorten_text_of_the_kind_trained_on(bpe: RankTokenizer) -> None:
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_training_is_repeatable(bpe: RankTokenizer) -> None:
    assert train_bpe(iter(TEXTS), 311).rank_file == bpe.rank_file


def test_few_texts_give_fewer_tokens_than_asked() -> None:
    small = train_bpe(["ababab"], 4096)
    assert 257 < small.n_vocab < 300
    assert train_bpe(["anything"], 257).n_vocab == 257


def test_special_text_is_plain_text(tokenizer: ByteTokenizer | RankTokenizer) -> None:
    ids = tokenizer.encode("<|endoftext|>")
    assert tokenizer.end_of_text not in ids and tokenizer.decode(ids) == "<|endoftext|>"


def test_end_of_text_adds_no_bytes(tokenizer: ByteTokenizer | RankTokenizer) -> None:
    assert tokenizer.byte_lengths()[tokenizer.end_of_text] == 0
    assert tokenizer.decode([tokenizer.end_of_text, *tokenizer.encode("x"), tokenizer.end_of_text]) == "x"


def test_lone_surrogates_are_replaced(tokenizer: ByteTokenizer | RankTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udcff")) == "a\ufffdb\ufffd"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_broken_characters_decode_to_the_replacement() -> None:
    assert ByteTokenizer().decode(list("é".encode())[:1]) == "\ufffd"


@pytest.mark.parametrize("unit", [" ", "a", "-", "\n", "😀"])
def test_very_long_runs(bpe: RankTokenizer, unit: str) -> None:
    text = unit * (BLOCK_CHARACTERS + 13)
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_equal_single_texts(tokenizer: ByteTokenizer | RankTokenizer, threads: int) -> None:
    texts = [*TEXTS, "", "x"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts, threads)] == [tokenizer.encode(t) for t in texts]


def test_saved_is_loaded(tokenizer: ByteTokenizer | RankTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    found = load_tokenizer(tmp_path)
    assert found.identity == tokenizer.identity and found.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_the_saved_form_never_changes(tokenizer: ByteTokenizer | RankTokenizer, tmp_path: Path) -> None:
    """Checkpoints and prepared folders hold its sha256, and a file of the same tokenizer has to be the same file."""
    tokenizer.save(tmp_path)
    expected = "{\n" + ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in tokenizer.description().items())
    assert (tmp_path / "tokenizer.json").read_text() == expected + "\n}\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: (folder / "tokenizer.json").write_text('{"kind": "words", "identity": "w"}'),
        lambda folder: (folder / "tokenizer.tiktoken").unlink(),
        lambda folder: (folder / "tokenizer.tiktoken").write_bytes(b"\xff\xfe no ranks"),
        lambda folder: (folder / "tokenizer.tiktoken").write_bytes((folder / "tokenizer.tiktoken").read_bytes()[:100]),
        lambda folder: (
            train_bpe(["zzzzzzz qqqqq"], 259).save(folder) or (folder / "tokenizer.json").write_text(BEFORE[0])
        ),
    ],
)
def test_damage_is_named(bpe: RankTokenizer, tmp_path: Path, damage) -> None:
    bpe.save(tmp_path)
    BEFORE[:] = [(tmp_path / "tokenizer.json").read_text()]
    damage(tmp_path)
    with pytest.raises(UserError, match="tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


BEFORE: list[str] = []


def test_a_large_vocabulary_has_ids_of_32_bits(tmp_path: Path) -> None:
    tokenizer, text = large_tokenizer(), rare_text(40)
    tokenizer.save(tmp_path)
    found = configured_tokenizer(TokenizerConfig("bpe", None, str(tmp_path)))
    ids = found.encode_array(text)
    assert found.identity == tokenizer.identity and found.n_vocab == N_VOCAB
    assert ids.dtype == np.uint32 and len(ids) == 40 and ids.min() >= FIRST_RARE and found.decode(ids.tolist()) == text
    assert ByteTokenizer().encode_array(text).dtype == train_bpe([text], 300).encode_array(text).dtype == np.uint16


def test_rank_files_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea.text.load_tokenizer.LARGEST_VOCABULARY", N_VOCAB - 1)
    large_tokenizer().save(tmp_path)
    with pytest.raises(UserError, match="holds 70000 tokens, more than 69999"):
        configured_tokenizer(TokenizerConfig("bpe", None, str(tmp_path / "tokenizer.tiktoken")))


def test_configured(bpe: RankTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    assert configured_tokenizer(TokenizerConfig("byte", None, None)).n_vocab == 257
    assert configured_tokenizer(TokenizerConfig("bpe", 311, None)) is None
    for path in (tmp_path, tmp_path / "tokenizer.tiktoken", tmp_path / "tokenizer.json"):
        assert configured_tokenizer(TokenizerConfig("bpe", 311, str(path))).identity == bpe.identity


def test_wrong_paths_are_named(bpe: RankTokenizer, tmp_path: Path) -> None:
    for folder in ("bpe", "byte", "empty", "theirs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(OF_ANOTHER_MODEL))
    bpe.save(tmp_path / "bpe")
    ByteTokenizer().save(tmp_path / "byte")
    wrong = {
        ("bpe", 4096, "bpe"): "tokenizer.vocab_size=311",
        ("bpe", 311, "missing"): "does not exist",
        ("bpe", 311, "empty"): "has no tokenizer.json",
        ("bpe", 311, "byte"): "choose tokenizer=byte",
        ("gpt2", None, "bpe"): "choose tokenizer=bpe",
        ("gpt2", None, "empty"): "vocab.bpe",
        ("gpt2", None, "missing"): "does not exist",
        ("gpt2", None, "bpe/tokenizer.tiktoken"): "GPT-2 has 50257",
        ("bpe", "auto", "theirs"): "choose tokenizer=hf",
        ("gpt2", None, "theirs/tokenizer.json"): "choose tokenizer=hf",
        ("hf", None, "bpe"): "choose tokenizer=bpe",
        ("hf", None, "empty"): "has no tokenizer.json",
    }
    for (kind, size, name), words in wrong.items():
        with pytest.raises(UserError, match=words) as caught:
            configured_tokenizer(TokenizerConfig(kind, size, str(tmp_path / name)))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("special", [True, False])
def test_end_of_text_of_another_model_is_plain_text_in_a_text(special: bool, tmp_path: Path) -> None:
    end = OF_ANOTHER_MODEL["added_tokens"][0] | {"special": special}
    (tmp_path / "tokenizer.json").write_text(json.dumps(OF_ANOTHER_MODEL | {"added_tokens": [end]}))
    found = load_tokenizer(tmp_path)
    ids = found.encode("a<|endoftext|>b")
    assert found.end_of_text == 256 and 256 not in ids and found.decode(ids) == "a<|endoftext|>b"


@needs_cache
def test_gpt2_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
    found, cached = load_gpt2(str(CACHE)), load_gpt2(None)
    assert found.identity == cached.identity and (found.n_vocab, found.end_of_text) == (50257, 50256)
    assert found.encode("Hello world") == [15496, 995]  # as published
    found.save(tmp_path)
    assert load_gpt2(str(tmp_path)).identity == found.identity
    assert load_gpt2(str(tmp_path / "tokenizer.tiktoken")).decode([15496, 995]) == "Hello world"


@needs_cache
def test_damaged_gpt2_files_are_refused(tmp_path: Path) -> None:
    for file in CACHE.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    os.truncate(tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", 1000)
    with pytest.raises(UserError, match="vocab.bpe"):
        load_gpt2(str(tmp_path))


def test_gpt2_without_a_network_says_which_files_to_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken.registry

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="tokenizer.path=") as caught:
        load_gpt2(None)
    assert "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in str(caught.value) and "\n" not in str(caught.value)


def test_the_description_is_plain_json(bpe: RankTokenizer) -> None:
    assert json.loads(json.dumps(bpe.description())) == bpe.description()


@pytest.mark.parametrize("pattern", ["(a+)+$", "(", "(?<=a+)b"])
def test_a_pattern_from_a_file_is_never_run(pattern: str, tmp_path: Path) -> None:
    train_bpe(["the fox"], 260).save(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(description | {"pattern": pattern}))
    with pytest.raises(UserError, match="was changed"):
        load_tokenizer(tmp_path)


def test_a_description_nested_without_end_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 50_000)
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer(tmp_path)
