"""Classes of transformers that hold a model exactly: which is chosen, and that its logits are ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from exportable import LAYERNORM, NANO, logits_of, make_trained, tokens_of

from andrea.api.command_line import configure
from andrea.config import RunConfig, UserError
from andrea.interop import proof
from andrea.interop.architectures import STOCK, Trained, choose_class
from andrea.interop.gguf import choose_architecture
from andrea.interop.hugging_face.target import HuggingFace, write_folder
from andrea.interop.proof import compared_text
from andrea.text.tokenizer import RankTokenizer

PAGE = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
RELU2 = {"mlp": "relu2"}
GPT2 = LAYERNORM | {"position": "learned", "mlp": "gelu"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "llama, groups and its own head": ("LlamaForCausalLM", {"n_kv_head": 2, "tied_head": False}, {}),
    "llama, biases": ("LlamaForCausalLM", {"bias": True, "n_kv_head": 3}, {}),
    "llama, no positions": ("LlamaForCausalLM", {"position": "none"}, {}),
    "llama, scaled positions": ("LlamaForCausalLM", {"rotary_scaling": (8.0, 1.0, 4.0, 20.0)}, {}),
    "llama, interpolated positions": ("LlamaForCausalLM", {"rotary_scaling": (2.5,)}, {}),
    "llama, wide heads": ("LlamaForCausalLM", {"d_head": 14, "n_kv_head": 2}, {}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "n_kv_head": 2}, {}),
    "qwen3, wide heads": ("Qwen3ForCausalLM", {"qk_norm": True, "d_head": 14, "n_head": 7}, {}),
    "qwen3, weighted QK-norm": ("Qwen3ForCausalLM", {"qk_norm": "learned", "d_head": 14, "n_kv_head": 3}, {}),
    "qwen3, windows": ("Qwen3ForCausalLM", {"qk_norm": True, "tied_head": False}, {"window": (9, None)}),
    "qwen3, no positions": ("Qwen3ForCausalLM", {"qk_norm": True, "position": "none"}, {}),
    "gpt2": ("GPT2LMHeadModel", GPT2, {}),
    "gpt2, exact GELU": ("GPT2LMHeadModel", GPT2 | {"mlp": "gelu_exact"}, {}),
    "gpt2, no biases, groups": ("GPT2LMHeadModel", GPT2 | {"bias": False, "n_kv_head": 2, "tied_head": False}, {}),
    "gpt2, squared ReLU, no positions": ("GPT2LMHeadModel", GPT2 | RELU2 | {"position": "none"}, {}),
    "gpt2, no positions, heads of odd width": ("GPT2LMHeadModel", GPT2 | {"position": "none", "n_head": 4}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_class_computes_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits within the class's tolerance, greedy tokens with its own cache, and token ids."""
    pytest.importorskip("transformers", minversion="5.10")
    monkeypatch.setattr(proof, "N_FUZZ_TEXTS", 50)
    kind, model, attention = CASES[name]
    trained = make_trained(model, attention)
    target = HuggingFace(trained, "f32")
    assert target.what == kind and kind in target.why and not target.chosen.is_remote
    target.write(tmp_path)
    assert not (tmp_path / "modeling_andrea.py").exists()
    other = target.open(tmp_path)
    text = compared_text(trained, None, tmp_path, 200)
    found = proof.prove(trained, trained.gpt, other, target.share, target.least, text)
    assert type(other.model).__name__ == kind and found.largest_logit > 5
    assert found.failures == [] and found.n_greedy_tokens == 35


ROWS = re.findall(
    r"^\| `(\S+?)`(?: and the larger sizes)?(?: with (.+?))? \| `(\w+)`.*? \| (\S+) \|$", PAGE, re.MULTILINE
)


@pytest.mark.parametrize(("preset", "changes", "kind", "architecture"), ROWS)
def test_the_table_of_the_page_says_what_is_chosen(preset: str, changes: str, kind: str, architecture: str) -> None:
    """Each row of docs/interop.md; `or` separates settings that have the same effect."""
    for words in re.findall("`(.+?)`", changes) or [""]:
        trained = small_of(preset, words)
        assert choose_class(trained)[0].name == kind
        if architecture == "no":
            with pytest.raises(UserError, match="train with model=nano-qwen3"):
                choose_architecture(trained)
        else:
            assert choose_architecture(trained).name == architecture.strip("`")


def small_of(preset: str, words: str = "") -> Trained:
    """A model with the settings of a preset, of few parameters. words: further settings, as typed."""
    config = configure(RunConfig, "train", [f"model={preset}", *words.split()])
    small = {"d_model": 12, "n_head": 3, "n_kv_head": None, "n_layer": 1, "d_mlp": 8, "sequence_length": 16}
    model = {name: getattr(config.model, name) for name in config.model.__dataclass_fields__} | small
    attention = {name: getattr(config.attention, name) for name in config.attention.__dataclass_fields__}
    bpe = RankTokenizer("bpe", {bytes([value]): value for value in range(256)} | {b"ab": 256})
    return make_trained(model, attention, bpe)


def test_the_table_has_every_stock_class_and_is_right_for_the_larger_sizes() -> None:
    assert {kind for _, _, kind, _ in ROWS} == {stock.name for stock in STOCK} | {"AndreaForCausalLM"}
    for size in ("12m", "120m", "480m", "2b"):
        assert choose_class(small_of(f"andrea-{size}"))[0].name == "AndreaForCausalLM"


def test_why_no_stock_class_fits() -> None:
    chosen, why = choose_class(make_trained(NANO))
    assert chosen.is_remote and "Qwen3ForCausalLM, lacks model.logit_softcap=15.0, model.value_residual=true" in why
    assert len({stock.model_type for stock in STOCK}) == len(STOCK)


@pytest.mark.parametrize(
    ("model", "lacking"),
    [
        (GPT2 | {"d_head": 14}, "GPT2LMHeadModel, lacks model.d_head=14"),
        ({"n_head": 7, "d_head": 14}, "model.n_head=7"),
        ({"position": "none", "n_head": 4}, "LlamaForCausalLM, lacks model.position=none (of an odd head width)"),
    ],
)
def test_a_head_width_that_a_class_does_not_have_is_named(model: dict[str, Any], lacking: str) -> None:
    chosen, why = choose_class(make_trained(model))
    assert chosen.is_remote and lacking in why
    as_wide = make_trained(GPT2 | {"d_head": 10})  # what d_model / n_head is too
    assert choose_class(as_wide)[0].name == "GPT2LMHeadModel"


def test_additive_scores_are_refused() -> None:
    with pytest.raises(
        UserError, match="attention.compatibility=additive cannot be exported.*train with attention=bilinear"
    ):
        choose_class(make_trained({"position": "learned"}, {"compatibility": "additive"}))


def test_large_weights_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.10")
    monkeypatch.setattr("andrea.interop.hugging_face.target.LARGEST_SHARD_BYTES", 50_000)
    trained = make_trained(NANO)
    write_folder(tmp_path, trained, choose_class(trained)[0], "f32")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3 and not (tmp_path / "model.safetensors").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=True
    )
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens_of()).logits, logits_of(trained, tokens_of()))
