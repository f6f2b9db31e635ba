"""GGUF files: what llama.cpp computes from them is ours, and what it cannot hold is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exportable import BLOCKS_OF_32, LAYERNORM, NANO, make_trained
from importable import write_tokenizer

from andrea.config import UserError
from andrea.interop import proof
from andrea.interop.gguf import Gguf, check_file, choose_architecture, neighbours_first
from andrea.interop.proof import compared_text
from andrea.text.load_tokenizer import load_hf_tokenizer
from andrea.text.tokenizer import Tokenizer, train_bpe

GELU = LAYERNORM | {"mlp": "gelu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, groups and its own head": ("llama", {"n_kv_head": 2, "tied_head": False}),
    "llama, no positions": ("llama", {"position": "none"}),
    "qwen3": ("qwen3", {"qk_norm": True, "n_kv_head": 1}),
    "qwen3, no positions": ("qwen3", {"qk_norm": True, "position": "none"}),
    "llama, narrow heads": ("llama", {"d_head": 8, "n_kv_head": 2}),
    "qwen3, wide heads, of a number that does not divide": ("qwen3", {"qk_norm": True, "d_head": 64, "n_head": 3}),
    "qwen3, weighted QK-norm": ("qwen3", {"qk_norm": "learned", "d_head": 32, "n_kv_head": 2}),
    "gpt2": ("gpt2", GELU | {"position": "learned"}),
    "gpt2, no biases, groups": (
        "gpt2",
        GELU | {"position": "learned", "bias": False, "n_kv_head": 2, "tied_head": False},
    ),
    "llama, interpolated positions": ("llama", {"rotary_scaling": (2.5,)}),
    "llama, Llama 3.1's positions": ("llama", {"rotary_scaling": (8.0, 1.0, 4.0, 20.0), "n_kv_head": 2}),
}


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([Path(__file__).read_text(encoding="utf-8")], 400)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_ours(name: str, dtype: str, bpe: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    if dtype not in ("f32", "q8_0", "q4_0") and name not in ("llama", "gpt2"):
        pytest.skip("other types: one architecture of each kind is enough")
    monkeypatch.setattr(proof, "N_FUZZ_TEXTS", 500)
    architecture, changes = CASES[name]
    trained = make_trained(BLOCKS_OF_32 | changes, tokenizer=bpe)
    target = Gguf(trained, dtype)
    target.write(tmp_path)
    text = compared_text(trained, None, tmp_path, 200)
    found = proof.prove(trained, target.rounded_gpt(), target.open(tmp_path), target.share, target.least, text)
    assert target.what == architecture and found.largest_logit > 5
    assert found.failures == []
    assert found.n_greedy_tokens == 35  # the window of 43 tokens, less the prompt
    if dtype == "f32":
        assert found.largest_difference < (1e-4 if "mlp" not in changes else 1e-2)


def test_what_no_architecture_holds_is_refused_with_the_nearest_option() -> None:
    with pytest.raises(UserError) as refused:
        choose_architecture(make_trained(NANO))
    assert "\n" not in str(refused.value)
    assert "qwen3, lacks model.logit_softcap=15.0, model.value_residual=true" in str(refused.value)
    assert "train with model=nano-qwen3" in str(refused.value)
    for model, attention in (
        ({}, {"window": 5}),
        ({"bias": True}, {}),
        (GELU | {"position": "learned", "d_head": 12}, {}),
        (GELU, {}),
        ({"mlp": "relu2"}, {}),
        ({"position": "alibi"}, {}),
        ({"position": "none", "n_head": 4}, {}),  # heads of 15 numbers
        ({}, {"sink": True}),
    ):
        with pytest.raises(UserError, match="lacks"):
            choose_architecture(make_trained(model, attention))


def test_tokenizers_and_types_that_a_file_cannot_hold_are_refused(bpe: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer of single bytes; train with tokenizer=bpe"):
        Gguf(make_trained(), "f32")
    write_tokenizer(tmp_path, 300)
    with pytest.raises(UserError, match="the tokenizer of another model is not written to a GGUF file"):
        Gguf(make_trained(tokenizer=load_hf_tokenizer(tmp_path)), "f32")
    with pytest.raises(UserError, match="multiples of 32, got model.d_model=60, model.d_mlp=77; export with dtype=f16"):
        check_file(make_trained(tokenizer=bpe), "q8_0")
    with pytest.raises(UserError, match="dtype=q4_0 needs multiples of 32, got model.d_model=60"):
        check_file(make_trained(tokenizer=bpe), "q4_0")
    with pytest.raises(UserError, match="multiples of 32, got model.n_head=4 times model.d_head=14; export"):
        check_file(make_trained(BLOCKS_OF_32 | {"d_head": 14}, tokenizer=bpe), "q8_0")


def test_without_the_package_gguf_one_line_says_what_to_install(
    bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="needs the package gguf; run: pip install gguf"):
        Gguf(make_trained(tokenizer=bpe), "f32")


def test_a_folder_with_a_space_is_quoted_in_the_commands_of_the_card(bpe: Tokenizer) -> None:
    pytest.importorskip("gguf")
    usage = Gguf(make_trained(tokenizer=bpe), "f32").usage("my model", None, "")
    assert "llama-server -m 'my model/model.gguf' " in usage and 'Llama("my model/model.gguf")' in usage


def test_rows_of_pairs_become_neighbours() -> None:
    assert neighbours_first(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
