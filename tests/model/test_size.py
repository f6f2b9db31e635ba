"""Sizes: parameters against the model itself, FLOPs against torch's counter, bytes against tensors that exist."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_options import ALL_OPTIONS
from planned_memory import plan_memory
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from andrea.api.command_line import configure
from andrea.config import AttentionConfig, RunConfig, group_config
from andrea.config.keys import choices
from andrea.model import GPT, count_parameters, flops_per_token, forward_flops_per_token
from andrea.training.evaluation import probe
from andrea.training.loss.loss import training_loss_sum
from andrea.training.optimizer import Optimizer
from andrea.training.parallel.ranks import Parallel
from andrea.training.planning.memory import EVALUATION_SHARE, RESIDENT_SHARE, Memory

pytestmark = pytest.mark.untraced

ATTENTION = AttentionConfig("scaled_dot", "auto")
REFERENCE = AttentionConfig("scaled_dot", "reference")


def read_config(name):
    return group_config("model", name)


TINY = replace(read_config("andrea-nano"), d_model=30, n_layer=2, n_head=3, d_mlp=44, sequence_length=23)
V = 37


def test_gpt2_small_has_the_published_count():
    parameters = count_parameters(read_config("gpt2"), ATTENTION, 50257)
    assert parameters.total == 124_439_808
    assert parameters.embedding == (50257 + 1024) * 768
    assert parameters.head == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value_residual": False},
        {"position": "learned", "tied_head": True},
        {"mlp": "swiglu", "bias": True, "norm": "layernorm"},
    ],
)
def test_parts_add_up_to_the_model(changes):
    config = replace(TINY, **changes)
    parameters = count_parameters(config, ATTENTION, V)
    assert parameters.total == sum(parameter.numel() for parameter in GPT(config, ATTENTION, V).parameters())
    assert parameters.head == (0 if config.tied_head else V * 30)
    taps = 3 * 30 * (config.qkv_convolution or 0)
    assert parameters.attention == 2 * (4 * (30 * 30 + 30 * config.bias) + config.value_residual + taps)
    assert parameters.norm == 5 * 30 * (2 if config.norm == "layernorm" and config.bias else 1)


@pytest.mark.parametrize("name", choices("model"))
def test_every_shipped_size_answers(name):
    config = read_config(name)
    parameters = count_parameters(config, ATTENTION, 50257)
    memory = plan_memory(config, ATTENTION, 50257, micro_batch=1, precision="bf16", optimizer="muon")
    assert memory.weights == memory.gradients == 4 * parameters.total
    assert memory.optimizer <= 8 * parameters.total and memory.gathered == memory.python_and_libraries == 0
    # each matrix costs 6 FLOPs a parameter, and the lookup of an embedding costs none
    matrices = parameters.total - parameters.embedding - parameters.norm
    assert flops_per_token(config, ATTENTION, 50257) >= 5.9 * matrices


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_flops_are_what_torch_counts(mlp):
    """torch counts every score; the causal mask halves that part. And the first layer's values twice, as eager code makes them."""
    config = replace(TINY, mlp=mlp)
    model, tokens = GPT(config, REFERENCE, V), torch.zeros(1, config.sequence_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens))
    masked = 2 * config.n_layer * config.d_model * config.sequence_length
    per_token = forward_flops_per_token(config, REFERENCE, V)
    again = 2 * config.d_model**2 * config.value_residual
    assert counter.get_total_flops() == (per_token + masked + again) * config.sequence_length
    assert flops_per_token(config, REFERENCE, V) == 3 * per_token


def test_flops_add_up_the_windows_of_the_layers():
    """23 tokens. The mean over the sequence counts half of each diagonal key, with a window as without one."""
    config = replace(TINY, n_layer=3)
    wide, narrow, mixed = (
        forward_flops_per_token(config, replace(ATTENTION, window=window), V) for window in (None, (3,), (3, None))
    )
    assert replace(ATTENTION, window=3).window_of(2) == replace(ATTENTION, window=(3,)).window_of(2) == 3
    saved = 4 * 30 * (23 / 2 - (3 - 9 / 46))  # in one layer
    assert (wide - narrow, wide - mixed) == pytest.approx((3 * saved, 2 * saved), abs=1)


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_options_of_the_heads_are_counted(option):
    of_model, of_attention = ALL_OPTIONS[option]
    config, attention = replace(TINY, **of_model), replace(REFERENCE, **of_attention)
    model, tokens = GPT(config, attention, V), torch.zeros(1, config.sequence_length, dtype=torch.int64)
    assert count_parameters(config, attention, V).total == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens))
    masked = 2 * config.n_layer * config.d_attended * config.sequence_length
    again = 2 * config.d_model * config.d_attended * config.value_residual
    per_token = forward_flops_per_token(config, attention, V)
    assert counter.get_total_flops() == (per_token + masked + again) * config.sequence_length


@pytest.mark.parametrize("option", ALL_OPTIONS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_of_options_is_what_the_allocator_really_hands_out(option, precision):
    of_model, of_attention = ALL_OPTIONS[option]
    config = replace(TINY, d_model=96, d_mlp=256, n_layer=3, sequence_length=127, **of_model)
    attention = replace(ATTENTION, **of_attention)
    model = GPT(config, attention, V)
    tokens = torch.zeros(7, config.sequence_length, dtype=torch.int64)

    def passes():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            nats = training_loss_sum(model, model(tokens), tokens, precision)
        nats.backward()

    passes()
    how = {"micro_batch": 7, "precision": precision, "optimizer": "muon", "on_cpu": True}
    plan = plan_memory(config, attention, V, **how)
    assert plan.activations / RESIDENT_SHARE["off"] == pytest.approx(allocated_at_most(passes), rel=0.1)
    muon = Optimizer(Parallel(model), configure(RunConfig, "train", []).optimizer, bf16=False)
    muon.step(1.0, torch.tensor(True))
    state = sum(each.numel() for name, each in muon.state_tensors().items() if not name.endswith("/step"))
    assert plan.optimizer == 4 * state


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


def allocated_at_most(run):
    """Bytes that torch's CPU allocator had handed out at the fullest moment of run(), above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    events = [event["args"] for event in events if event.get("name") == "[memory]"]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


@pytest.mark.parametrize("qk_clip", [None, 100.0])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_the_allocator_really_hands_out(precision, recompute, qk_clip):
    config = replace(TINY, d_model=96, d_mlp=256, n_layer=3, sequence_length=127)
    model = GPT(config, ATTENTION, V)
    tokens = torch.zeros(7, config.sequence_length, dtype=torch.int64)

    def passes():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            hidden = model(tokens, statistics=qk_clip is not None, recompute=recompute)
            hidden = hidden if qk_clip is None else hidden[0]
            nats = training_loss_sum(model, hidden, tokens, precision)
        del hidden
        nats.backward()

    passes()  # gradients are there from now on
    how = {"micro_batch": 7, "precision": precision, "optimizer": "adamw", "recompute": recompute, "on_cpu": True}
    plan = plan_memory(config, replace(ATTENTION, qk_clip=qk_clip), V, **how)
    assert plan.activations / RESIDENT_SHARE["off"] == pytest.approx(allocated_at_most(passes), rel=0.1)


@pytest.mark.parametrize(("mlp", "d_mlp"), [("relu2", 384), ("swiglu", 384), ("swiglu", 96)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_muons_temporaries_are_what_the_allocator_really_hands_out(precision, mlp, d_mlp):
    run = configure(RunConfig, "train", ["model.d_model=96", f"model.d_mlp={d_mlp}", f"model.mlp={mlp}"])

    def planned_and_real(config):
        model = GPT(config, ATTENTION, V)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = Optimizer(Parallel(model), run.optimizer, bf16=precision == "bf16")
        plan = plan_memory(config, ATTENTION, V, micro_batch=1, precision=precision, optimizer="muon")
        return plan.optimizer_step, allocated_at_most(lambda: optimizer.muon.step(1.0, torch.tensor(True)))

    planned, real = planned_and_real(run.model)
    assert planned == pytest.approx(real, rel=0.15)
    # At another depth, output matrices have a rate of their own: the plan is an upper bound, but for the room of a product.
    planned, real = planned_and_real(replace(run.model, n_layer=run.model.n_layer + 1))
    assert planned >= 0.95 * real


def side_by_side(config) -> int:
    """The weights of queries, keys and values of all layers."""
    attentions = [block.attention for block in GPT(config, ATTENTION, V).blocks]
    return sum(layer.weight.numel() for each in attentions for layer in (each.query, each.key, each.value))


def test_activations_grow_with_the_batch_and_shrink_with_precision_and_with_recomputation():
    tiny = replace(TINY, bigram_rows=None)  # the gradient of its table would be most of the memory, whatever the batch

    def activations(micro_batch, precision, recompute=False):
        return plan_memory(
            tiny, ATTENTION, V, micro_batch=micro_batch, precision=precision, optimizer="muon", recompute=recompute
        ).activations

    one, two, four = (activations(n, "fp32") for n in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)
    # What no sequence adds to: W_Q, W_K and W_V side by side in each layer, as a card multiplies them.
    assert 0 <= 2 * one - two <= 1.05 * 4 * side_by_side(tiny)
    assert activations(4, "bf16") < activations(4, "fp32")
    assert activations(4, "fp16") < activations(4, "fp32")
    assert activations(4, "fp32", recompute=True) < activations(4, "fp32")


def test_on_a_cpu_the_program_counts_and_its_compiler_saves():
    how = {"micro_batch": 2, "precision": "fp32", "optimizer": "adamw"}
    card, eager, compiled = (
        plan_memory(TINY, ATTENTION, V, on_cpu=on_cpu, compiled=compiled, **how)
        for on_cpu, compiled in ((False, True), (True, False), (True, True))
    )
    assert card.python_and_libraries == 0 < eager.python_and_libraries < compiled.python_and_libraries
    assert compiled.activations < card.activations < eager.activations


def test_the_peak_is_the_fullest_of_three_moments_and_on_a_cpu_their_sum():
    on_card = Memory(
        weights=2,
        gradients=3,
        optimizer=5,
        gathered=7,
        gathered_model=1,
        activations=11,
        optimizer_step=13,
        evaluation=0,
        python_and_libraries=0,
    )
    assert on_card.total == 2 + 3 + 5 + (7 + 11)
    assert replace(on_card, optimizer_step=23).total == 2 + 3 + 5 + 23
    assert replace(on_card, gathered_model=29).total == 2 + 5 + 29 + (7 + 11)  # the gradients are freed before
    on_cpu = replace(on_card, evaluation=19, python_and_libraries=17)
    assert on_cpu.total == 2 + 3 + 5 + 17 + 19 + (7 + 11) + 13


@pytest.mark.parametrize("compatibility", ["scaled_dot", "bilinear"])
def test_a_look_at_the_heads_is_what_the_allocator_really_hands_out(compatibility):
    config = replace(TINY, n_layer=3, sequence_length=127)
    attention = AttentionConfig(compatibility, "auto")
    model, tokens = GPT(config, attention, V), torch.zeros(5, 127, dtype=torch.int64)
    real = allocated_at_most(lambda: probe(model, tokens))
    how = {"micro_batch": 1, "precision": "bf16", "optimizer": "muon", "on_cpu": True}
    # a kernel's own copy of the scores, one of about six, is not seen from outside
    assert plan_memory(config, attention, V, **how).evaluation / EVALUATION_SHARE == pytest.approx(real, rel=0.2)
    assert plan_memory(config, attention, V, **how | {"on_cpu": False}).evaluation == 0


def test_a_share_of_what_is_kept_and_a_few_whole_blocks():
    """By hand: 4 bytes a parameter over 7 ranks; blocks of B parameters in bf16, three of them and one in fp32."""
    config = read_config("andrea-120m")
    how = {"micro_batch": 1, "precision": "bf16", "optimizer": "adamw"}
    whole, share = (plan_memory(config, ATTENTION, V, ranks=7, sharded=sharded, **how) for sharded in (False, True))
    total = count_parameters(config, ATTENTION, V).total
    in_blocks = sum(parameter.numel() for parameter in GPT(config, ATTENTION, V).blocks.parameters())
    assert share.weights == 4 * total // 7 and share.optimizer == 8 * total // 7
    assert share.gradients == whole.gradients  # summed over ranks once a step
    assert share.gathered == 10 * in_blocks // config.n_layer + 8 * (total - in_blocks)
    assert share.gathered_model == 4 * (total + config.d_model * config.d_mlp) and whole.gathered_model == 0
    assert whole.gathered == 0
    copies = 2 * sum(p.numel() for p in GPT(config, ATTENTION, V).blocks.parameters() if p.dim() == 2)
    copies -= 2 * side_by_side(config)  # which are put together in either case
    assert share.activations == pytest.approx(whole.activations - copies, rel=0.01)  # they come in bf16
