"""Ablation, patching, direct logit attribution and the logit lens equal those of TransformerLens on the exported model."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from exportable import BLOCKS_OF_32, LAYERNORM, NANO, Trained, make_trained, tokens_of
from torch import Tensor

from andrea.insight.lens.attribution import logit_parts, parts_of, written_parts
from andrea.insight.lens.interventions import ablate_heads, patch_all
from andrea.insight.lens.trace import LayerTrace, logit_lens, trace_layers
from andrea.interop.architectures import choose_class
from andrea.interop.hugging_face.target import write_folder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformer_lens", reason='needs TransformerLens: pip install "andrea[lens]"')

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the class of the export, and what is changed
    "GPT-2": ("GPT2LMHeadModel", LAYERNORM | {"position": "learned", "mlp": "gelu"}),
    "Llama": ("LlamaForCausalLM", {"n_kv_head": 2}),
    "Qwen3": ("Qwen3ForCausalLM", BLOCKS_OF_32 | {"qk_norm": "learned", "d_head": 24, "n_kv_head": 2}),
    "as Pythia": (
        "AndreaForCausalLM",
        LAYERNORM | {"parallel_residual": True, "mlp": "gelu_exact", "rotary_share": 0.4},
    ),
    "the default model": ("AndreaForCausalLM", NANO),
}
TOLERANCE = 1e-4  # of a logit, and of ln p
COMPARED = [11, 200]  # tokens: the logit of the first minus that of the second


class Both(NamedTuple):
    trained: Trained
    bridge: Any  # TransformerLens's model
    tokens: Tensor  # (1, T)
    against: Tensor
    layers: list[LayerTrace]
    others: list[LayerTrace]


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    from andrea.interop.transformer_lens.adapter import load_bridge

    class_name, changes = CASES[request.param]
    trained, folder = make_trained(changes), tmp_path_factory.mktemp("model")
    with torch.no_grad():
        for table in {trained.gpt.embedding.weight, trained.gpt.head_weight}:
            table.mul_(0.5)  # logits of a few units, as a trained model has them
    exported_as = choose_class(trained)[0]
    assert exported_as.name == class_name
    write_folder(folder, trained, exported_as, "f32")
    tokens, against = tokens_of(2, 13).split(1)
    against[0, :2], against[0, -1] = tokens[0, :2], tokens[0, -1]
    layers, others = (list(trace_layers(trained.gpt, each)) for each in (tokens, against))
    return Both(trained, load_bridge(folder, device="cpu"), tokens, against, layers, others)


def close(name: str, found: Tensor, expected: Tensor) -> None:
    difference = float((found - expected).abs().max())
    print(f"{name}: {difference:.1e} of {float(expected.abs().max()):.2f}")
    assert found.shape == expected.shape and difference <= TOLERANCE
    assert expected.abs().max() > 0.1  # or the test could not fail


@torch.no_grad()
def test_ablations(both: Both) -> None:
    model, width = both.trained.gpt, both.trained.model.head_width

    for layer in range(model.config.n_layer):
        for head, found in ablate_heads(model, both.tokens, layer, both.layers[layer], range(model.config.n_head)):

            def without(z: Tensor, hook: Any, channels: slice = slice(head * width, (head + 1) * width)) -> Tensor:
                changed = z.clone().flatten(2)
                changed[..., channels] = 0
                return changed.view_as(z)

            hooks = [(f"blocks.{layer}.attn.hook_z", without)]
            expected = both.bridge.run_with_hooks(both.tokens, fwd_hooks=hooks)
            close(f"ablation of {layer}.{head}", found, expected.log_softmax(-1)[0])


@torch.no_grad()
def test_patching(both: Both) -> None:
    from transformer_lens import patching

    model, bridge = both.trained.gpt, both.bridge
    found = patch_all(model, both.layers, both.others, torch.tensor(COMPARED))
    found = {name: each[..., 0] - each[..., 1] for name, each in found.items()}
    _, cache = bridge.run_with_cache(both.against)

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, COMPARED[0]] - logits[0, -1, COMPARED[1]]

    theirs = {
        "stream": patching.get_act_patch_resid_pre,
        "attention": patching.get_act_patch_attn_out,
        "mlp": patching.get_act_patch_mlp_out,
        "heads": patching.get_act_patch_attn_head_out_all_pos,
    }
    if both.trained.model.value_residual:
        del theirs["stream"]  # ours replaces the first layer's values of the position as well
    for name, patch in theirs.items():
        expected = patch(bridge, both.tokens, cache, metric)
        close(f"patching, {name}", found[name], expected)
    assert (found["whole"][0] - found["whole"][1]).abs() > 0.02


@torch.no_grad()
def test_direct_logit_attribution(both: Both) -> None:
    model, bridge = both.trained.gpt, both.bridge
    parts = list(written_parts(model, both.tokens, both.layers))
    candidates = torch.tensor(COMPARED).expand(both.tokens.shape[1], -1)
    added = logit_parts(model, both.layers[-1], parts, candidates)
    found = (added[..., 0] - added[..., 1])[[part.kind == "head" for part in parts_of(model)] + [False]]
    _, cache = bridge.run_with_cache(both.tokens)
    # TransformerLens leaves the final norm's weight to the unembedding, into which we multiply it here.
    weight = model.final_norm.weight
    stack = cache.apply_ln_to_stack(cache.stack_head_results(), layer=-1)[:, 0] * weight
    direction = bridge.W_U[:, COMPARED[0]] - bridge.W_U[:, COMPARED[1]]
    close("direct logit attribution", found, stack @ direction)


@torch.no_grad()
def test_the_logit_lens(both: Both) -> None:
    model, bridge = both.trained.gpt, both.bridge
    _, cache = bridge.run_with_cache(both.tokens)
    stack, labels = cache.accumulated_resid(
        incl_mid=not model.config.parallel_residual, apply_ln=True, return_labels=True
    )
    found = torch.stack(list(logit_lens(model, both.layers)))
    if model.config.parallel_residual:
        found = found[::2]  # no norm stands between attention and MLP, and TransformerLens has no such stage
    logits = bridge.unembed(stack[:, 0])
    if model.config.logit_softcap is not None:
        logits = model.config.logit_softcap * torch.tanh(logits / model.config.logit_softcap)
    assert len(labels) == len(found)
    close("logit lens", found, logits.log_softmax(-1))
