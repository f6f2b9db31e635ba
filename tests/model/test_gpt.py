"""The model as a whole: causality, cache, initialisation, compilation, and GPT-2's own logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from head_options import ALL_KINDS, ALL_OPTIONS, HEAD_OPTIONS, SCORES, draw_what_starts_alike
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

from andrea.config import AttentionConfig, group_config
from andrea.model import GPT, initialise
from andrea.model.gpt import FIRST_VALUES, call_block

ATTENTION = AttentionConfig("scaled_dot", "auto")
B, V = 2, 37


def read_config(name):
    return group_config("model", name)


SMALL = {"d_model": 30, "n_layer": 2, "n_head": 3, "d_mlp": 44, "sequence_length": 23}
TINY = replace(read_config("andrea-nano"), **SMALL)
TINY_GPT2 = replace(read_config("gpt2"), **SMALL)
VARIANTS = {
    "nano": TINY,
    "gpt2": TINY_GPT2,
    "no position": replace(TINY, position="none"),
    "swiglu": replace(TINY, mlp="swiglu", bias=True, tied_head=False),
    "first layer's values": replace(TINY, n_layer=3, n_kv_head=1, value_residual=not TINY.value_residual),
}
SINKS = AttentionConfig("scaled_dot", "auto", score_softcap=3.0, sink=True)
WINDOWS = AttentionConfig("scaled_dot", "auto", window=(3, 5, None))
COMPILED = {  # compiling takes seconds: what differs from nano is compiled together, as no two parts meet in one layer
    "nano": TINY,
    "gpt2": TINY_GPT2,
    "all others": replace(
        TINY, position="none", mlp="swiglu", bias=True, tied_head=False, n_layer=3, n_kv_head=1,
        value_residual=not TINY.value_residual,
    ),
}  # fmt: skip


def make(config, attention=ATTENTION, seed=0):
    model = GPT(config, attention, V)
    initialise(model, torch.Generator().manual_seed(seed))
    draw_what_starts_alike(model)
    return model


def some_tokens(n_token=17):
    return torch.randint(V, (B, n_token), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_and_causality_bitwise(variant):
    """Through every layer, on the readable path."""
    model, tokens = make(VARIANTS[variant], AttentionConfig("scaled_dot", "reference")), some_tokens()
    hidden = model(tokens)
    assert hidden.shape == (B, 17, 30)
    assert model.logits(hidden).shape == (B, 17, V)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % V
    after = model(changed)
    assert torch.equal(after[:, :11], hidden[:, :11])
    assert not torch.equal(after[:, 11:], hidden[:, 11:])


def test_a_list_of_windows_repeats_over_the_layers():
    """The last hidden vector of one layer depends on the tokens of its window alone."""
    config = replace(TINY, n_layer=5, value_residual=False, qkv_convolution=None)
    tokens = some_tokens()
    model = make(config, WINDOWS)
    shared = model.block_inputs(tokens)[1]
    for block, window in zip(model.blocks, (3, 5, None, 3, 5), strict=True):
        x = torch.randn(1, 17, 30, requires_grad=True)
        block(x, shared)[0][0, -1].sum().backward()
        seen = x.grad[0].abs().sum(-1) > 0
        assert seen.tolist() == [window is None or 17 - position <= window for position in range(17)]


def test_each_layer_s_window_in_the_cache():
    for fixed_shapes in (False, True):
        model, tokens = make(replace(TINY, n_layer=4), WINDOWS).double(), some_tokens()
        cache = model.make_cache(B, 19, fixed_shapes=fixed_shapes)
        pieces = [model.logits(model(chunk, cache)) for chunk in tokens.split([7, 1, 1, 3, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model.logits(model(tokens)))


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("attention", [SINKS, ATTENTION], ids=["cap and sink", "ALiBi alone"])
def test_alibi_caps_and_sinks_in_the_cache(attention, fixed_shapes):
    model, tokens = make(replace(TINY, position="alibi", n_kv_head=1), attention).double(), some_tokens()
    cache = model.make_cache(B, 19, fixed_shapes=fixed_shapes)
    pieces = [model.logits(model(chunk, cache)) for chunk in tokens.split([7, 1, 1, 3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model.logits(model(tokens)))


def test_sinks_begin_at_zero_and_learn():
    model, tokens = GPT(TINY, SINKS, V), some_tokens()
    initialise(model, torch.Generator().manual_seed(0))
    assert not any(block.attention.sink.any() for block in model.blocks)
    model.logits(model(tokens)).square().sum().backward()
    assert all(block.attention.sink.grad.all() for block in model.blocks)


@pytest.mark.untraced
def test_blocks_of_equal_window_share_one_compiled_graph():
    graphs = []
    compiled = torch.compile(
        call_block, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True, dynamic=False
    )
    model = make(replace(TINY, n_layer=7), WINDOWS)
    for _ in range(2):
        model(some_tokens(), call_block=compiled).sum().backward()
    assert len(graphs) == 3


@pytest.mark.parametrize("compatibility", ["scaled_dot", "dot"])
def test_fast_and_reference_attention_give_the_same_logits(compatibility):
    tokens = some_tokens()
    logits = []
    for implementation in ("reference", "sdpa"):
        model = make(replace(TINY, qk_norm=False), AttentionConfig(compatibility, implementation)).double()
        logits.append(model.logits(model(tokens)))
    torch.testing.assert_close(*logits)


def test_the_scale_is_what_tells_dot_from_scaled_dot():
    """With sqrt(d_head) divided out of the query projection the plain dot product gives the scaled one's logits."""
    config, tokens = replace(TINY, qk_norm=False), some_tokens()
    scaled, dot = make(config).double(), make(config, AttentionConfig("dot", "auto")).double()
    assert not torch.allclose(scaled(tokens), dot(tokens), rtol=1e-6)
    with torch.no_grad():
        for block in dot.blocks:
            block.attention.query.weight /= config.head_width**0.5
    torch.testing.assert_close(scaled(tokens), dot(tokens))


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_and_uncached_logits_are_equal(variant, fixed_shapes):
    model, tokens = make(VARIANTS[variant]).double(), some_tokens()
    cache = model.make_cache(B, 19, fixed_shapes=fixed_shapes)
    pieces = [model.logits(model(chunk, cache)) for chunk in tokens.split([7, 1, 1, 3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model.logits(model(tokens)))
    assert cache.length == 17


def test_the_cache_follows_the_weights_type():
    model = make(TINY).to(torch.bfloat16)
    cache = model.make_cache(B, 19)
    assert cache.keys[0].dtype == torch.bfloat16 and len(cache.keys) == TINY.n_layer
    assert model(some_tokens(), cache).dtype == torch.bfloat16


def test_bf16_autocast_trains_fp32_weights():
    model, tokens = make(TINY), some_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(model(tokens))
    exact = model.logits(model(tokens))
    assert (logits - exact).abs().max() < 0.02 * exact.abs().max()
    cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() == (name != "blocks.0.attention.value_mix"), name  # which mixes like with like


@pytest.mark.untraced
@pytest.mark.parametrize("variant", COMPILED)
def test_compiles_whole_in_training_and_never_again_while_decoding(variant):
    """Traced by dynamo and differentiated ahead of time; generating C++ is left to the runs themselves."""
    model, tokens = make(COMPILED[variant]), some_tokens()
    whole = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}

    @torch.compile(**whole)
    def loss(tokens):
        return cross_entropy(model.logits(model(tokens)).flatten(0, 1), tokens.flatten())

    with torch.autocast("cpu", torch.bfloat16):
        loss(tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    torch._dynamo.reset()
    decode = torch.compile(lambda tokens, cache: model.logits(model(tokens, cache)), **whole)
    cache = model.make_cache(B, 19, fixed_shapes=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        decoded = [decode(token.clone(), cache) for token in tokens.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(decoded, dim=1), model.logits(model(tokens)))


# ------------------------------------------------------------------------------------- activation checkpointing


def loss_and_gradients(model, tokens, recompute, autocast, compiled):
    """(loss, gradients, statistics of each layer) of one training pass."""

    def passed(tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden, layers = model(tokens, statistics=True, recompute=recompute)
            return cross_entropy(model.logits(hidden).float().flatten(0, 1), tokens.flatten()), layers

    torch._dynamo.reset()
    run = torch.compile(passed, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else passed
    loss, layers = run(tokens)
    model.zero_grad()
    loss.backward()
    return loss, [parameter.grad.clone() for parameter in model.parameters()], layers


TRAINED = {
    "scaled_dot": ATTENTION,
    "packed": replace(ATTENTION, across_documents=False),
    "additive": AttentionConfig("additive", "auto"),
}


@pytest.mark.parametrize(
    ("attention", "autocast", "compiled"),
    [(attention, autocast, False) for attention in TRAINED.values() for autocast in (False, True)]
    + [pytest.param(TRAINED[name], True, True, marks=pytest.mark.slow) for name in ("packed", "additive")],
    ids=lambda value: value.compatibility if isinstance(value, AttentionConfig) else None,
)
def test_recomputation_changes_no_bit_and_observes_each_layer_once(attention, autocast, compiled):
    config = replace(
        TINY, position="learned" if attention.compatibility == "additive" else "rotary", value_residual=True
    )
    model = GPT(config, attention, V, end_of_text=0)
    initialise(model, torch.Generator().manual_seed(0))
    kept, recomputed = (loss_and_gradients(model, some_tokens(), each, autocast, compiled) for each in (False, True))
    assert torch.equal(kept[0], recomputed[0])
    assert all(torch.equal(one, two) for one, two in zip(kept[1], recomputed[1], strict=True))
    assert len(kept[2]) == len(recomputed[2]) == config.n_layer
    for one, two in zip(kept[2], recomputed[2], strict=True):
        assert all(torch.equal(*parts) for parts in zip(one, two, strict=True) if parts[0] is not None)


def test_recomputation_keeps_one_input_a_block():
    """Autograd is asked what it keeps between the passes: a block more costs its input, and nothing else."""

    def bytes_kept(n_layer, recompute):
        model, tokens = make(replace(TINY, n_layer=n_layer)), some_tokens()
        own = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers())}
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model(tokens, recompute=recompute)
        assert hidden.requires_grad
        return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)

    of_input = 4 * B * 17 * TINY.d_model
    assert bytes_kept(5, True) - bytes_kept(4, True) == of_input
    assert bytes_kept(5, False) - bytes_kept(4, False) > 10 * of_input


# ------------------------------------------------------------------------------------------------ initialisation


def test_every_weight_is_drawn_and_the_seed_decides():
    first, second, third = make(TINY), GPT(TINY, ATTENTION, V), make(TINY, seed=1)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.fill_(torch.nan)
    initialise(second, torch.Generator().manual_seed(0))
    draw_what_starts_alike(second)
    for (name, one), two, other in zip(first.named_parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.dim() == 1 or name.endswith(tuple(FIRST_VALUES)) or not torch.equal(one, other), name


def test_deviations_follow_the_table():
    config = replace(TINY_GPT2, d_model=60, d_mlp=240, n_layer=2, sequence_length=300)
    weights = dict(make(config).named_parameters())
    expected = {
        "embedding.weight": 0.02,
        "position.weight": 0.02,
        "blocks.0.attention.query.weight": 0.5 / 60**0.5,
        "blocks.1.attention.output.weight": 0.5 / 60**0.5 / 2,
        "blocks.0.mlp.up.weight": 0.5 / 60**0.5,
        "blocks.1.mlp.down.weight": 0.5 / 240**0.5 / 2,
    }
    for name, deviation in expected.items():
        assert weights[name].std().item() == pytest.approx(deviation, rel=0.1), name
    assert all((weight == 1).all() for name, weight in weights.items() if name.endswith("norm.weight"))
    assert all((weight == 0).all() for name, weight in weights.items() if name.endswith("bias"))


def test_a_tied_head_is_the_embedding():
    tied, untied = make(replace(TINY, tied_head=True)), make(replace(TINY, tied_head=False))
    assert "head.weight" not in dict(tied.named_parameters())
    assert dict(untied.named_parameters())["head.weight"].shape == (V, 30)
    hidden = torch.randn(B, 30)
    expected = 15 * torch.tanh(hidden @ tied.embedding.weight.T / 15)
    torch.testing.assert_close(tied.logits(hidden), expected)


# ------------------------------------------------------------------------------------------------ GPT-2


def load_gpt2(model, theirs):
    """Hugging Face's GPT-2 weights by our names; its Conv1D keeps matrices (d_in, d_out)."""
    ours = {"embedding.weight": theirs["transformer.wte.weight"], "position.weight": theirs["transformer.wpe.weight"]}
    names = {"attention_norm": "ln_1", "attention.output": "attn.c_proj", "mlp_norm": "ln_2"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(model.config.n_layer):
            for our_name, their_name in names.items():
                ours[f"blocks.{layer}.{our_name}.{kind}"] = theirs[f"transformer.h.{layer}.{their_name}.{kind}"].T
            fused = theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"]
            for part, values in zip(("query", "key", "value"), fused.chunk(3, dim=-1), strict=True):
                ours[f"blocks.{layer}.attention.{part}.{kind}"] = values.T
    model.load_state_dict(ours)


@pytest.mark.filterwarnings("ignore")
def test_gpt2_gives_hugging_faces_logits():
    transformers = pytest.importorskip("transformers")
    config = TINY_GPT2
    their_config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=config.sequence_length,
        n_embd=config.d_model,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_inner=config.d_mlp,
    )
    theirs = transformers.GPT2LMHeadModel(their_config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # biases and norms too, at a size that makes every term count
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours, tokens = GPT(config, ATTENTION, V).double(), some_tokens()
    load_gpt2(ours, theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits)


def test_packed_documents_are_read_as_if_alone():
    """Hidden vectors of a document are the same whatever stands before it; across_documents=true sees the difference."""
    end, config = 0, replace(TINY, position="rotary")
    first, second = torch.tensor([end, 5, 6, 7]), torch.tensor([end, 3, 9, 9, 4])
    other = torch.tensor([end, 8, 1, 2])
    for across in (False, True):
        attention = replace(ATTENTION, across_documents=across)
        model = GPT(config, attention, V, end)
        initialise(model, torch.Generator().manual_seed(0))
        hidden = [model(torch.cat((before, second))[None])[0, 4:] for before in (first, other)]
        assert torch.equal(hidden[0], hidden[1]) == (not across)
        if not across:  # rotary positions tell distance alone
            torch.testing.assert_close(hidden[0], model(second[None])[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_grouped_heads_have_smaller_projections_and_a_smaller_cache(n_kv_head):
    config = replace(TINY, n_head=4, n_kv_head=n_kv_head, d_model=32)
    model = GPT(config, ATTENTION, V)
    initialise(model, torch.Generator().manual_seed(0))
    assert model.blocks[0].attention.key.weight.shape == (n_kv_head * 8, 32)
    cache = model.make_cache(2, 7)
    assert cache.keys[0].shape == (2, n_kv_head, 7, 8)
    tokens = torch.randint(V, (2, 7))
    parts = [model(part, cache) for part in tokens.split([3, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-4)


def test_value_residual_is_the_plain_model_where_the_first_layer_s_share_is_none():
    mixed, plain = (make(replace(TINY, n_layer=3, value_residual=on)).double() for on in (True, False))
    with torch.no_grad():
        for block in mixed.blocks:
            block.attention.value_mix.fill_(-1000.0)
    assert torch.equal(mixed(some_tokens()), plain(some_tokens()))


def test_value_residual_has_no_use_for_a_layer_s_own_values_where_the_first_layer_s_share_is_all():
    model = make(replace(TINY, n_layer=3, value_residual=True)).double()
    with torch.no_grad():
        model.blocks[1].attention.value_mix.fill_(1000.0)
    model(some_tokens()).square().sum().backward()
    first, second, third = (block.attention.value.weight.grad for block in model.blocks)
    assert not second.any() and first.any() and third.any()


def test_the_first_layer_s_values_stay_its_own_whatever_its_share():
    model = make(replace(TINY, n_layer=1, value_residual=True)).double()
    plain = make(replace(TINY, n_layer=1, value_residual=False)).double()
    with torch.no_grad():
        model.blocks[0].attention.value_mix.fill_(0.7)
    torch.testing.assert_close(model(some_tokens()), plain(some_tokens()))


def test_a_model_trained_by_one_implementation_generates_by_any():
    """A cache makes T and S differ, which not every kernel serves: there the fastest that does is taken."""
    model = GPT(TINY, replace(ATTENTION, implementation="sdpa_flash"), V)
    initialise(model, torch.Generator().manual_seed(0))
    tokens = torch.randint(V, (1, 5))
    with pytest.raises(ValueError, match="sdpa_flash"):
        model(tokens)
    assert model(tokens, model.make_cache(1, 7)).isfinite().all()


# ------------------------------------------------------------------------------------------ options of the heads


def make_with(option, implementation="auto", **changes):
    of_model, of_attention = ALL_OPTIONS[option]
    config = replace(TINY, **{"n_layer": 3, "n_kv_head": 1, **of_model, **changes})
    return make(config, AttentionConfig("scaled_dot", implementation, **of_attention))


@pytest.mark.parametrize("option", HEAD_OPTIONS)
def test_options_on_every_path_of_the_cpu(option):
    """Fused, written out, with a cache: equal logits; and the readable path never sees the future, bitwise."""
    tokens, model = some_tokens(), make_with(option, "reference")
    expected = model.double()(tokens)
    torch.testing.assert_close(make_with(option, "sdpa").double()(tokens), expected)
    cache = model.make_cache(B, 19)
    pieces = [model(chunk, cache) for chunk in tokens.split([7, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % V
    assert torch.equal(model(changed)[:, :11], expected[:, :11])
    of_documents = GPT(
        model.config, replace(ATTENTION, across_documents=False, **HEAD_OPTIONS[option][1]), V, end_of_text=V
    ).double()
    of_documents.load_state_dict(model.state_dict())
    torch.testing.assert_close(of_documents(tokens), expected)  # of one document


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_options_in_bf16_err_no_more_than_the_model_without_them(option):
    """Under autocast, as in training: twice the error of the plain model."""
    tokens, errors = some_tokens(), []
    for model in (make_with(option), make(replace(TINY, n_layer=3, n_kv_head=1))):
        exact = model.double()(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            error = (model.float()(tokens) - exact).abs().max() / exact.abs().max()
        errors.append(error.item())
    assert errors[0] <= 2 * errors[1] + 2**-8, errors


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_options_recompute_to_the_same_bits_and_every_parameter_learns(option):
    model = make_with(option)
    kept, recomputed = (loss_and_gradients(model, some_tokens(), each, True, False) for each in (False, True))
    assert torch.equal(kept[0], recomputed[0])
    for (name, _), one, two in zip(model.named_parameters(), kept[1], recomputed[1], strict=True):
        assert torch.equal(one, two) and one.isfinite().all(), name
        assert one.any() or name == "blocks.0.attention.value_mix", name


@pytest.mark.untraced
@pytest.mark.parametrize(
    "option",
    [each if each in (ALL_KINDS, SCORES) else pytest.param(each, marks=pytest.mark.slow) for each in ALL_OPTIONS],
)
def test_options_compile_into_one_graph_for_all_blocks(option):
    """As compile=blocks does: the second and third block reuse the graph of the first."""
    model, tokens = make_with(option), some_tokens()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call_block, backend=counter, fullgraph=True, dynamic=False)
    torch.testing.assert_close(model(tokens, call_block=compiled), model(tokens))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "changes", [{"gate": "elementwise"}, {"value_embedding": "projection"}, {"value_embedding": "table"}], ids=str
)
def test_gates_and_value_embeddings_begin_as_the_plain_model(changes):
    """At the start the other weights are those of a model without the option, drawn from the same numbers."""
    config, attention = (
        (replace(TINY, **changes), ATTENTION) if "gate" not in changes else (TINY, replace(ATTENTION, **changes))
    )
    plain, new = GPT(TINY, ATTENTION, V), GPT(config, attention, V)
    for model in (plain, new):
        initialise(model, torch.Generator().manual_seed(0))
    assert torch.equal(new(some_tokens()), plain(some_tokens()))
