"""Activations in TransformerLens are those of our lens: Qwen3's class through its own adapter, the exported code through ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from exportable import BLOCKS_OF_32, LAYERNORM, NANO, Trained, logits_of, make_trained, tokens_of

from andrea.insight.lens.trace import trace_layers
from andrea.interop.architectures import choose_class
from andrea.interop.hugging_face.target import write_folder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformer_lens")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3's class": (BLOCKS_OF_32 | {"qk_norm": "learned", "d_head": 24}, {}),
    "the default model, wide heads": (NANO | {"qk_norm": "learned", "d_head": 14}, {}),
    "learned positions, LayerNorm, GELU, one key/value head, gates, bilinear": (
        LAYERNORM | {"position": "learned", "mlp": "gelu", "n_kv_head": 1},
        {"gate": "scalar", "exclusive": "learned", "compatibility": "bilinear"},
    ),
    "ALiBi, squared ReLU, sinks, windows, value tables": (
        {"position": "alibi", "mlp": "relu2", "tied_head": False, "value_embedding": "table"},
        {"sink": True, "score_softcap": 2.0, "window": (7, None, 11)},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Any]:
    from andrea.interop.transformer_lens.adapter import load_bridge

    trained, folder = make_trained(*CASES[request.param]), tmp_path_factory.mktemp("model")
    write_folder(folder, trained, choose_class(trained)[0], "f32")
    return trained, load_bridge(folder, device="cpu")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_patterns_residual_stream_and_logits_are_ours(both: tuple[Trained, Any]) -> None:
    trained, bridge = both
    tokens = tokens_of()
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(tokens)
    close(logits, logits_of(trained, tokens))
    for index, layer in enumerate(trace_layers(trained.gpt, tokens)):
        block = f"blocks.{index}"
        close(cache[f"{block}.hook_resid_pre"], layer.before)
        close(cache[f"{block}.attn.hook_pattern"], layer.weights)
        close(cache[f"{block}.attn.hook_z"].flatten(2), layer.written.transpose(1, 2).flatten(2))
        close(cache[f"{block}.hook_resid_post"], layer.after)


def test_a_head_that_is_switched_off_has_the_effect_that_it_has_here(both: tuple[Trained, Any]) -> None:
    trained, bridge = both
    tokens, head, width = tokens_of(1, 17), 2, trained.model.head_width

    def without_head(z: torch.Tensor, hook: Any) -> torch.Tensor:
        changed = z.clone().flatten(2)
        changed[..., head * width : (head + 1) * width] = 0
        return changed.view_as(z)

    with torch.no_grad():
        found = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", without_head)])
    output = trained.gpt.blocks[1].attention.output.weight
    kept = output[:, head * width : (head + 1) * width].clone()
    try:
        output.data[:, head * width : (head + 1) * width] = 0
        expected = logits_of(trained, tokens)
    finally:
        output.data[:, head * width : (head + 1) * width] = kept
    close(found, expected)
    assert (expected - logits_of(trained, tokens)).abs().max() > 0.01


def test_text_begins_with_end_of_text_as_in_training(both: tuple[Trained, Any]) -> None:
    trained, bridge = both
    expected = [trained.tokenizer.end_of_text, *trained.tokenizer.encode("one two")]
    assert bridge.to_tokens("one two")[0].tolist() == expected


def test_the_entry_point_names_the_adapter() -> None:
    import tomllib

    from andrea.interop.transformer_lens.adapter import ARCHITECTURE, AndreaAdapter

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["transformer_lens.architectures"] == {
        ARCHITECTURE: f"{AndreaAdapter.__module__}:{AndreaAdapter.__name__}"
    }
