"""The tokenizer's files give the same ids in transformers as here, for any text."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea.config import UserError
from andrea.interop.hugging_face.tokenizer_files import merges_of, visible_tokens, write_tokenizer
from andrea.text.tokenizer import END_OF_TEXT, ByteTokenizer, RankTokenizer, Tokenizer, train_bpe

transformers = pytest.importorskip("transformers", minversion="5.10")
SOURCE = Path(__file__).read_text(encoding="utf-8")
CUT_DIFFERENTLY = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "n't", END_OF_TEXT, "12", "½", "日本", "🤖", "\u2028"]
)
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | CUT_DIFFERENTLY, max_size=12).map(
    "".join
)


@functools.cache
def pair(kind: str) -> tuple[Tokenizer, Any]:
    """A tokenizer of ours, and the same in transformers, read from files."""
    ours = ByteTokenizer() if kind == "byte" else train_bpe([SOURCE, "日本語 日本語 🤖🤖 ½ ½ don't won't\r\n\r\n"], 600)
    if kind == "gpt2":  # another order of the single bytes, as in GPT-2's file
        order = [*range(33, 127), *range(33), *range(127, 256)]
        tokens = [bytes([value]) for value in order] + [token for token in ours.table if len(token) > 1]
        ours = RankTokenizer("gpt2", {token: rank for rank, token in enumerate(tokens)})
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), ours, 64)
        return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["bpe", "byte", "gpt2"])
@settings(max_examples=300)
@given(text=TEXTS)
def test_ids_are_ours_with_end_of_text_in_front(kind: str, text: str) -> None:
    ours, theirs = pair(kind)
    assert theirs(text)["input_ids"] == [ours.end_of_text, *ours.encode(text)]
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "byte", "gpt2"])
def test_the_settings_of_the_tokenizer(kind: str) -> None:
    ours, theirs = pair(kind)
    assert len(theirs) == ours.n_vocab
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == ours.end_of_text
    assert not theirs.clean_up_tokenization_spaces and theirs.padding_side == "left" and theirs.model_max_length == 64
    batch = theirs(["a", "a b c"], padding=True)
    assert batch["attention_mask"][0][0] == 0 and batch["input_ids"][0][0] == ours.end_of_text


def test_a_merge_is_found_for_every_token() -> None:
    ours = pair("bpe")[0]
    merges = merges_of(ours)
    assert [first + second for first, second in merges] == [token for token in ours.table if len(token) > 1]
    assert len(set(visible_tokens(ours))) == ours.n_vocab


def test_a_token_that_no_merge_makes_is_refused() -> None:
    tokens = [bytes([value]) for value in range(256)] + [b"abc"]
    broken = RankTokenizer("bpe", {token: rank for rank, token in enumerate(tokens)})
    with pytest.raises(UserError, match=r"cannot be exported: its token b'abc' is not made of two others"):
        merges_of(broken)
