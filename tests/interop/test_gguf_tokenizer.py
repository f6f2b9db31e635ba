"""A tokenizer.json in a GGUF file: llama.cpp gives the same ids, and what it does not know is refused by name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from exportable import BLOCKS_OF_32, make_trained
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from andrea.config import UserError
from andrea.interop import proof
from andrea.interop.compared_text import compared_text
from andrea.interop.gguf.target import Gguf
from andrea.interop.gguf.tokenizer import LLAMA_3, QWEN_2, GgufTokenizer, gguf_tokenizer
from andrea.text.load_tokenizer import HfTokenizer

N_VOCAB = 1000


def split(pattern: str, behavior: str = "isolated") -> Any:
    parts = [pre_tokenizers.Split(Regex(pattern), behavior), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


# llama.cpp's name -> the pre-tokenizer as in the tokenizer.json of such models, model.ignore_merges, normalizer
PRE: dict[str, tuple[Any, bool, Any]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(False), False, None),
    "qwen2": (split(QWEN_2), False, normalizers.NFC()),
    "llama-bpe": (split(LLAMA_3), True, None),
}


def tokenizer_json(pre_tokenizer: Any, ignore_merges: bool = False, normalizer: Any = None) -> dict[str, Any]:
    """A vocabulary of 800 tokens, two special tokens and two that are not; the rows from 804 on have no token.

    Merges are trained on whole lines, so that they would join what a pre-tokenizer keeps apart.
    """
    library = Library(models.BPE(ignore_merges=ignore_merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    lines += ["ünïcödé 日本語 한국\n", "123 4567 12 345 0 a1b\n", "don't WE'LL 's're (x)\r\n\n", "   \t \n"] * 100
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    library.add_tokens(["<think>", "   "])
    return json.loads(library.to_str())


def read(plain: dict[str, Any], end_of_text: int = 800) -> HfTokenizer:
    return HfTokenizer(json.dumps(plain).encode(), end_of_text, N_VOCAB, Path("tokenizer.json"))


@pytest.mark.parametrize("name", PRE)
def test_llama_cpp_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    tokenizer = read(tokenizer_json(*PRE[name]))
    trained = make_trained(BLOCKS_OF_32 | {"qk_norm": True}, tokenizer=tokenizer)
    target = Gguf(trained, "f32")
    assert target.tokenizer.pre == name
    assert ("form NFC" in target.why) == (name == "qwen2")
    target.write(tmp_path)
    other = target.open(tmp_path)
    found = proof.prove(
        trained, trained.gpt, other, target.share, target.least, compared_text(trained, None, tmp_path, 200)
    )
    assert found.failures == []
    texts = [
        "a<think>b  <think>",
        "x    y       z",
        "<|im_start|>user<|endoftext|>",
        "1234567 12",
        "  'S I'LL",
        "e\u0301 é",
    ]
    assert other.encode(texts) == [[800, *tokenizer.encode(text)] for text in texts]
    assert 802 in other.encode(texts)[0] and 801 not in other.encode(texts)[2]
    assert [other.model.detokenize([802, 803]), other.model.detokenize([797])] == [
        b"<think>   ",
        tokenizer.token_bytes()[797],
    ]


def test_without_a_normaliser_that_llama_cpp_lacks_ids_would_differ() -> None:
    """Why texts are brought into form NFC first: the tokenizer reads both spellings of é alike."""
    tokenizer = read(tokenizer_json(*PRE["qwen2"]))
    normalised = gguf_tokenizer(tokenizer).normalised
    assert normalised is not None and normalised("e\u0301") == "é" != "e\u0301"
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_kinds_of_tokens() -> None:
    written: GgufTokenizer = gguf_tokenizer(read(tokenizer_json(*PRE["gpt-2"]), end_of_text=801))
    assert len(written.tokens) == len(written.kinds) == N_VOCAB == len(set(written.tokens))
    assert written.tokens[800:805] == ["<|endoftext|>", "<|im_start|>", "<think>", "   ", "[PAD804]"]
    assert written.kinds[799:805] == ["NORMAL", "CONTROL", "CONTROL", "USER_DEFINED", "USER_DEFINED", "UNUSED"]
    assert len(written.merges) == 800 - 256 and all(merge.count(" ") == 1 for merge in written.merges)


def test_merges_of_old_files_are_read() -> None:
    plain = tokenizer_json(*PRE["gpt-2"])
    old = json.loads(json.dumps(plain))
    old["model"]["merges"] = [" ".join(pair) for pair in plain["model"]["merges"]]
    assert gguf_tokenizer(read(old)).merges == gguf_tokenizer(read(plain)).merges


def changed(path: str, value: Any, name: str = "gpt-2") -> dict[str, Any]:
    plain = tokenizer_json(*PRE[name])
    place = plain
    *parents, last = path.split(".")
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    place[last] = value
    return plain


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (lambda: tokenizer_json(pre_tokenizers.ByteLevel(True)), "no pre-tokenizer like that"),
        (
            lambda: tokenizer_json(split(r"\p{N}|\p{L}+")),
            r"like that of this tokenizer.json (Split \p{N}|\p{L}+, ByteLevel",
        ),
        (lambda: tokenizer_json(split(QWEN_2, "merged_with_next")), "no pre-tokenizer like that"),
        (lambda: tokenizer_json(split(QWEN_2), True), "no pre-tokenizer like that"),
        (lambda: tokenizer_json(split(LLAMA_3)), "no pre-tokenizer like that"),
        (lambda: tokenizer_json(pre_tokenizers.ByteLevel(False), True), "no pre-tokenizer like that"),
        (lambda: tokenizer_json(PRE["gpt-2"][0], normalizer=normalizers.Lowercase()), "does not normalise text"),
        (lambda: changed("model.byte_fallback", True), "byte_fallback=True of tokenizer.json is unknown to llama.cpp"),
        (lambda: changed("pre_tokenizer", None), "no pre-tokenizer like that of this tokenizer.json (none)"),
        (lambda: changed("added_tokens.2.lstrip", True), "'<think>' of tokenizer.json has lstrip=true"),
    ],
)
def test_what_llama_cpp_does_not_know_is_refused(plain, says: str) -> None:
    with pytest.raises(UserError) as refused:
        gguf_tokenizer(read(plain()))
    assert says in str(refused.value) and "\n" not in str(refused.value) and "export with to=hf" in str(refused.value)


def test_a_wrong_name_is_found_by_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's digits stay together up to three, Qwen's do not."""
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(proof, "N_FUZZ_TEXTS", 300)
    monkeypatch.setattr("andrea.interop.gguf.tokenizer.pre_name", lambda plain: "llama-bpe")
    trained = make_trained(BLOCKS_OF_32, tokenizer=read(tokenizer_json(split(QWEN_2))))
    target = Gguf(trained, "f32")
    target.write(tmp_path)
    text = compared_text(trained, None, tmp_path, 100)
    found = proof.prove(trained, trained.gpt, target.open(tmp_path), target.share, target.least, text)
    assert found.n_texts_with_other_ids > 10 and "texts get other token ids" in found.failures[0]
