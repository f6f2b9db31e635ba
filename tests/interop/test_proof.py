"""What a proof counts as a failure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from exportable import T, make_trained

from andrea.interop.proof import ComparedText, OtherProgram, compared_text, fuzz_texts, logits_of, prove
from andrea.text.tokenizer import ByteTokenizer


class Same(OtherProgram):
    """Our own model as the other program. broken: the window, counted from 0, whose logits hold a number that is none."""

    def __init__(self, trained, broken: int | None) -> None:
        self.name, self.trained, self.broken, self.asked = "same", trained, broken, 0

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        found = logits_of(self.trained.gpt, torch.tensor(list(tokens))).clone()
        if self.asked == self.broken:
            found[3, 5] = float("nan")
        self.asked += 1
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self.trained.tokenizer
        return [[tokenizer.end_of_text, *tokenizer.encode(text)] for text in texts]

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        text = list(tokens)
        for _ in range(n_new):
            text.append(int(logits_of(self.trained.gpt, torch.tensor(text))[-1].argmax()))
        return text[len(tokens) :]


@pytest.mark.parametrize(("broken", "is_proven"), [(None, True), (0, False), (1, False)])
def test_a_logit_that_is_no_number_is_a_failure_in_any_window(broken: int | None, is_proven: bool, monkeypatch) -> None:
    monkeypatch.setattr("andrea.interop.proof.N_FUZZ_TEXTS", 20)
    trained, content = make_trained(), "a text to compare on. " * 20
    ids = np.array([trained.tokenizer.end_of_text, *trained.tokenizer.encode(content)], dtype=np.int64)[: 3 * T]
    proof = prove(trained, trained.gpt, Same(trained, broken), 1e-5, 1e-5, ComparedText("text", ids, content))
    assert (not proof.failures) == is_proven
    if is_proven:
        assert proof.largest_difference == 0 and proof.bits_per_byte_other == proof.bits_per_byte > 0


def test_of_a_large_text_only_what_is_compared_is_encoded(tmp_path: Path, monkeypatch) -> None:
    """Two minutes and 20 GB for 100 MB otherwise, and `import` has limits for both."""
    trained, encode, lengths = make_trained(), ByteTokenizer.encode, []
    (tmp_path / "large.txt").write_text("a line of a large text\n" * 50_000)
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: lengths.append(len(text)) or encode(self, text))
    found = compared_text(trained, tmp_path / "large.txt", tmp_path, 100)
    assert found.ids.tolist() == [256, *b"a line of a large text\n" * 5][:100] and lengths[0] < 10_000 < len(
        found.content
    )


def test_fuzz_texts_hold_no_code_point_that_versions_of_unicode_disagree_on() -> None:
    """A trap that was met: tokenizers and llama.cpp cut U+140B2, which Unicode 16 made a letter, in different ways."""
    characters = set("".join(fuzz_texts("some text " * 10)))
    assert not {each for each in characters if unicodedata.category(each) in ("Cn", "Cs")}
    kinds = {unicodedata.category(each)[0] for each in characters}
    assert len(characters) > 2000 and kinds == {"C", "L", "M", "N", "P", "S", "Z"}
