"""Sizes: parameters against the model itself, FLOPs against torch's counter, bytes against tensors that exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from andrea.config import AttentionConfig, ModelConfig, parse
from andrea.model import GPT, count_parameters, flops_per_token, forward_flops_per_token, plan_memory

CONFIGS = Path(__file__).parents[1] / "configs" / "model"
ATTENTION = AttentionConfig("scaled_dot", "auto")
REFERENCE = AttentionConfig("scaled_dot", "reference")


def read_config(name):
    return parse(ModelConfig, yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), "model")


TINY = replace(read_config("andrea-nano"), d_model=30, n_layer=2, n_head=3, d_mlp=44, sequence_length=23)
V = 37


def test_gpt2_small_has_the_published_count():
    parameters = count_parameters(read_config("gpt2"), ATTENTION, 50257)
    assert parameters.total == 124_439_808
    assert parameters.embedding == (50257 + 1024) * 768
    assert parameters.head == 0


@pytest.mark.parametrize(
    "changes", [{}, {"position": "learned", "tied_head": True}, {"mlp": "swiglu", "bias": True, "norm": "layernorm"}]
)
def test_parts_add_up_to_the_model(changes):
    config = replace(TINY, **changes)
    parameters = count_parameters(config, ATTENTION, V)
    assert parameters.total == sum(parameter.numel() for parameter in GPT(config, ATTENTION, V).parameters())
    assert parameters.head == (0 if config.tied_head else V * 30)
    assert parameters.attention == 2 * 4 * (30 * 30 + 30 * config.bias)
    assert parameters.norm == 5 * 30 * (2 if config.norm == "layernorm" and config.bias else 1)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_size_answers(name):
    config = read_config(name)
    parameters = count_parameters(config, ATTENTION, 50257)
    memory = plan_memory(config, ATTENTION, 50257, micro_batch=1, precision="bf16", optimizer="muon")
    assert memory.weights == memory.gradients == 4 * parameters.total
    assert memory.total == memory.weights + memory.gradients + memory.optimizer + memory.activations
    # each matrix costs 6 FLOPs a parameter, and the embedding is only looked up
    matrices = parameters.total - parameters.embedding - parameters.norm
    assert flops_per_token(config, ATTENTION, 50257) >= 5.9 * matrices


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_flops_are_what_torch_counts(mlp):
    """torch counts every score; the causal mask halves that part."""
    config = replace(TINY, mlp=mlp)
    model, tokens = GPT(config, REFERENCE, V), torch.zeros(1, config.sequence_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens))
    masked = 2 * config.n_layer * config.d_model * config.sequence_length
    per_token = forward_flops_per_token(config, REFERENCE, V)
    assert counter.get_total_flops() == (per_token + masked) * config.sequence_length
    assert flops_per_token(config, REFERENCE, V) == 3 * per_token


def test_optimizer_state_is_what_torch_allocates():
    model = GPT(TINY, ATTENTION, V)
    optimizer = torch.optim.AdamW(model.parameters())
    model.logits(model(torch.zeros(1, 5, dtype=torch.int64))).sum().backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    plan = {
        kind: plan_memory(TINY, ATTENTION, V, micro_batch=1, precision="fp32", optimizer=kind)
        for kind in ("adamw", "muon")
    }
    assert plan["adamw"].optimizer == sum(4 * moment.numel() for moment in moments)
    matrices = 2 * (4 * 30 * 30 + 3 * 30 * 44)  # blocks · (q, k, v, output; gate, up, down)
    assert plan["adamw"].optimizer - plan["muon"].optimizer == 4 * matrices


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_really_keeps(precision):
    """The same hooks around a real forward pass, on tensors that hold memory."""
    model, tokens = GPT(TINY, ATTENTION, V), torch.zeros(3, TINY.sequence_length, dtype=torch.int64)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        loss = cross_entropy(model.logits(model(tokens)).float().flatten(0, 1), tokens.flatten())
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    plan = plan_memory(TINY, ATTENTION, V, micro_batch=3, precision=precision, optimizer="adamw")
    assert loss.requires_grad
    assert plan.activations == pytest.approx(real, rel=0.02)


def test_activations_grow_with_the_batch_and_shrink_with_precision():
    def activations(micro_batch, precision):
        return plan_memory(
            TINY, ATTENTION, V, micro_batch=micro_batch, precision=precision, optimizer="muon"
        ).activations

    assert activations(4, "fp32") == pytest.approx(4 * activations(1, "fp32"), rel=0.05)
    assert activations(4, "bf16") < activations(4, "fp32")
    assert activations(4, "fp16") == activations(4, "bf16")
