"""Multi-head attention against arithmetic written out head by head, and against torch's own module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from andrea.attention import (
    COMPATIBILITIES,
    MultiHeadAttention,
    ScaledDotProduct,
    SharedInputs,
    ValueEmbedding,
    attend,
    causal,
    key_padding,
    make_compatibility,
    multihead,
)
from andrea.attention.cache import KeyValueCache
from andrea.attention.multihead import VALUE_EMBEDDINGS

B, T, S, H, D = 2, 7, 11, 3, 5
D_MODEL = H * D


def make(**options):
    torch.manual_seed(0)
    return MultiHeadAttention(D_MODEL, H, compatibility=ScaledDotProduct(), **options).double()


def vectors(n_token, width=D_MODEL):
    return torch.randn(B, n_token, width, dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
def test_sum_over_heads_equals_the_concatenated_form(bias):
    """Each head has its own rows of W_Q, W_K, W_V and its own columns of W_O."""
    attention, x = make(mask=causal(), bias=bias), vectors(T)
    total = attention.output.bias if bias else 0
    for head in range(H):
        own = slice(head * D, (head + 1) * D)
        query, key, value = (
            nn.functional.linear(x, part.weight[own], part.bias[own] if bias else None)
            for part in (attention.query, attention.key, attention.value)
        )
        total = total + attend(query, key, value, mask=causal()) @ attention.output.weight[:, own].T
    torch.testing.assert_close(attention(x), total)


def test_values_are_mixed_with_the_first_layer_s():
    attention, x, first = make(mask=causal(), value_residual=True), vectors(T), torch.randn(B, H, T, D).double()
    with torch.no_grad():
        attention.value_mix.fill_(0.7)
    share, own = torch.sigmoid(torch.tensor(0.7, dtype=torch.float64)), attention.heads(attention.value(x))
    value = share * first + (1 - share) * own
    query, key = attention.heads(attention.query(x)), attention.heads(attention.key(x))
    expected = attention.output(attend(query, key, value, mask=causal()).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, shared=SharedInputs(first_value=first)), expected)


def test_fsdp_finds_the_tensors_that_layers_share():
    """It looks for them with pytree, which takes a dataclass for a leaf."""
    first = torch.randn(B, H, T, D)
    assert tree_leaves(SharedInputs(first_value=first))[0] is first


def test_the_first_layer_s_values_are_neither_forgotten_nor_thrown_away():
    x, first = vectors(T), torch.randn(B, H, T, D).double()
    for attention, given in ((make(value_residual=True), None), (make(), first)):
        with pytest.raises(ValueError, match="value_residual=True needs"):
            attention(x, shared=SharedInputs(first_value=given))


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_torchs_own_module_with_the_same_weights(is_causal):
    attention, x = make(mask=causal() if is_causal else None, bias=True), vectors(T)
    theirs = nn.MultiheadAttention(D_MODEL, H, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([part.weight for part in (attention.query, attention.key, attention.value)])
        )
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in (attention.query, attention.key, attention.value)]))
        theirs.out_proj.load_state_dict(attention.output.state_dict())
    hidden_from = torch.ones(T, T, dtype=torch.bool).triu(1) if is_causal else None
    torch.testing.assert_close(attention(x), theirs(x, x, x, attn_mask=hidden_from, need_weights=False)[0])


@pytest.mark.parametrize("position", [0, 3, T - 2])
def test_the_future_changes_nothing_bitwise(position):
    """Through the whole module, on the readable path."""
    attention, x = make(mask=causal(), implementation="reference"), vectors(T)
    before = attention(x)
    x[:, position + 1 :] += 1
    assert torch.equal(attention(x)[:, : position + 1], before[:, : position + 1])


def test_without_a_mask_order_means_nothing():
    attention, x, order = make(), vectors(T), torch.randperm(T)
    torch.testing.assert_close(attention(x[:, order]), attention(x)[:, order])


def test_cross_attention_takes_a_context_of_another_width_and_length():
    attention, x, context = make(d_context=17), vectors(T), vectors(S, 17)
    output = attention(x, context)
    assert output.shape == (B, T, D_MODEL)
    order = torch.randperm(S)
    torch.testing.assert_close(attention(x, context[:, order]), output)  # a memory is a set


def test_cross_attention_never_sees_padding():
    lengths = torch.tensor([4, 0])
    attention = make(mask=key_padding(lengths[:, None]), d_context=17)
    x, context = vectors(T), vectors(S, 17)
    output = attention(x, context)
    context[0, 4:] = 1e3
    torch.testing.assert_close(attention(x, context), output)
    torch.testing.assert_close(output[0], make(d_context=17)(x[:1], context[:1, :4])[0])
    assert (output[1] == 0).all()  # nothing to retrieve


def test_implementations_agree():
    x = vectors(T)
    outputs = [make(mask=causal(), implementation=name)(x) for name in ("reference", "sdpa", "auto")]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


def test_normalised_queries_and_keys_do_not_feel_their_length():
    attention, x = make(mask=causal(), qk_norm_epsilon=1e-12), vectors(T)
    before = attention(x)
    with torch.no_grad():
        attention.query.weight *= 37
        attention.key.weight *= 0.1
    torch.testing.assert_close(attention(x), before)


def test_normalised_queries_and_keys_have_weights_of_their_own():
    """By hand; with weights of one, it is the norm without weights."""
    attention, x = make(mask=causal(), qk_norm_epsilon=1e-6, qk_norm_weights=True), vectors(T)
    torch.testing.assert_close(attention(x), make(mask=causal(), qk_norm_epsilon=1e-6)(x))
    with torch.no_grad():
        attention.query_norm.copy_(torch.linspace(-2, 3, D))
        attention.key_norm.copy_(torch.linspace(0.5, 7, D))
    query, key = attention.heads(attention.query(x)), attention.heads(attention.key(x))
    query, key = (each / (each.square().mean(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    query, key = query * torch.linspace(-2, 3, D).double(), key * torch.linspace(0.5, 7, D).double()
    retrieved = attend(query, key, attention.heads(attention.value(x)), mask=causal())
    torch.testing.assert_close(attention(x), attention.output(attention.merged(retrieved)))
    with pytest.raises(ValueError, match="qk_norm_weights=True needs qk_norm_epsilon="):
        make(qk_norm_weights=True)


def test_place_is_given_queries_and_keys_and_nothing_else():
    attention, x = make(mask=causal()), vectors(T)
    placed = []
    attention(x, shared=SharedInputs(place=lambda tensor: placed.append(tensor) or tensor))
    query, key = attention.heads(attention.query(x)) / D**0.5, attention.heads(attention.key(x))
    torch.testing.assert_close(placed, [query, key])  # lowered first: the scale is in the query


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_with_a_cache_a_token_at_a_time(fixed_shapes):
    attention, x = make(mask=causal()), vectors(T)
    cache = KeyValueCache(1, B, H, S, D, dtype=torch.float64, fixed_shapes=fixed_shapes)
    outputs = []
    for chunk in x.split([3, 1, 1, 2], dim=1):
        outputs.append(attention(chunk, cache=cache.layer(0)))
        cache.advance(chunk.shape[1])
    torch.testing.assert_close(torch.cat(outputs, dim=1), attention(x))


@pytest.mark.parametrize(
    ("d_model", "n_head", "d_head"), [(384, 12, 32), (768, 12, 64), (1536, 24, 64), (4096, 32, 128)]
)
def test_head_widths(d_model, n_head, d_head):
    """d_model / n_head, for the sizes of common models."""
    with torch.device("meta"):
        assert MultiHeadAttention(d_model, n_head, compatibility=ScaledDotProduct()).d_head == d_head


def test_a_head_width_that_is_not_whole_is_refused():
    with pytest.raises(ValueError, match="n_head=5 does not divide d_model=12"):
        MultiHeadAttention(12, 5, compatibility=ScaledDotProduct())


@pytest.mark.parametrize("d_head", [2, 7])
def test_heads_of_another_width_than_their_share_of_d_model(d_head):
    """Narrower and wider than d_model / n_head: the sum over heads, each with its own rows and columns of the matrices."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(13, H, compatibility=ScaledDotProduct(), mask=causal(), d_head=d_head, n_kv_head=1)
    attention, x = attention.double(), vectors(T, 13)
    assert attention.query.weight.shape == (H * d_head, 13) and attention.output.weight.shape == (13, H * d_head)
    assert attention.key.weight.shape == attention.value.weight.shape == (d_head, 13)
    key, value = attention.key(x), attention.value(x)
    of_head = attention.query.weight.split(d_head), attention.output.weight.split(d_head, dim=1)
    total = sum(attend(x @ query.T, key, value, mask=causal()) @ out.T for query, out in zip(*of_head, strict=True))
    torch.testing.assert_close(attention(x), total)


@pytest.mark.parametrize("n_kv_head", [1, 2, 3, 6])
def test_grouped_heads_share_keys_and_values(n_kv_head):
    """As many heads again with the shared projections written out for each: the same output."""
    torch.manual_seed(0)
    heads, width = 6, 5
    options = {"compatibility": ScaledDotProduct(), "mask": causal(), "bias": True}
    grouped = MultiHeadAttention(heads * width, heads, n_kv_head=n_kv_head, **options).double()
    assert grouped.key.out_features == grouped.value.out_features == n_kv_head * width
    full = MultiHeadAttention(heads * width, heads, **options).double()
    repeated = {
        name: tensor.unflatten(0, (n_kv_head, width)).repeat_interleave(heads // n_kv_head, 0).flatten(0, 1)
        if name.startswith(("key", "value"))
        else tensor
        for name, tensor in grouped.state_dict().items()
    }
    full.load_state_dict(repeated)
    x = torch.randn(2, 7, heads * width, dtype=torch.float64)
    for implementation in ("reference", "sdpa"):
        grouped.implementation = implementation
        torch.testing.assert_close(grouped(x), full(x))


def test_groups_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="n_kv_head=2 does not divide n_head=3"):
        MultiHeadAttention(12, 3, compatibility=ScaledDotProduct(), n_kv_head=2)


@pytest.mark.parametrize("name", COMPATIBILITIES)
def test_a_cache_serves_every_compatibility_function(name):
    torch.manual_seed(0)
    attention = MultiHeadAttention(
        D_MODEL, H, compatibility=make_compatibility(name, H, D), mask=causal(), n_kv_head=1
    ).double()
    x, cache, outputs = vectors(T), KeyValueCache(1, B, 1, S, D, dtype=torch.float64), []
    for chunk in x.split([3, 1, 1, 2], dim=1):
        outputs.append(attention(chunk, cache=cache.layer(0)))
        cache.advance(chunk.shape[1])
    torch.testing.assert_close(torch.cat(outputs, dim=1), attention(x))


def test_what_has_no_lowered_form_cannot_be_turned():
    attention = MultiHeadAttention(D_MODEL, H, compatibility=make_compatibility("additive", H, D))
    with pytest.raises(ValueError, match="rotary positions need .* method `lower`, and Additive has none"):
        attention(torch.randn(B, T, D_MODEL), shared=SharedInputs(place=lambda tensor: tensor))


def test_the_view_of_each_heads_own_output_matrix_is_a_view():
    attention = make()
    assert attention.output_by_head.shape == (H, D_MODEL, D)
    assert torch.equal(attention.output_by_head[1], attention.output.weight[:, D : 2 * D])
    assert attention.output_by_head.untyped_storage().data_ptr() == attention.output.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", VALUE_EMBEDDINGS)
def test_value_embeddings_are_added_to_the_values_and_to_nothing_else(kind):
    """By hand, with grouped heads; the share of the first layer's values comes before."""
    torch.manual_seed(0)
    embedding = ValueEmbedding(kind, D_MODEL, 29, D)
    layer = MultiHeadAttention(
        D_MODEL, H, compatibility=ScaledDotProduct(), mask=causal(), n_kv_head=1, value_embedding=embedding,
        value_residual=True,
    ).double()  # fmt: skip
    x, first = vectors(T), torch.randn(B, 1, T, D, dtype=torch.float64)
    source = vectors(T) if kind == "projection" else torch.randint(29, (B, T))
    assert torch.equal(embedding(source, torch.float64), torch.zeros(B, T, D).double())  # at the start
    with torch.no_grad():
        embedding.mix.fill_(0.7)
        (embedding.projection or embedding.table).weight.normal_()
    added = 0.7 * (source @ embedding.projection.weight.T if kind == "projection" else embedding.table.weight[source])
    shared = SharedInputs(first_value=first, value_source=source)
    query, key, value, _ = layer.project(x, shared=shared)
    torch.testing.assert_close(value[:, 0], 0.5 * first[:, 0] + 0.5 * x @ layer.value.weight.T + added)
    torch.testing.assert_close(key[:, 0], x @ layer.key.weight.T)
    assert tree_leaves(shared)[1] is source
    for other in (SharedInputs(first_value=first), SharedInputs(value_source=source)):
        with pytest.raises(ValueError, match="needs SharedInputs"):
            layer(x, shared=other)
    names, parameters = zip(*embedding.named_parameters(), strict=True)

    def embedded(*parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(embedding, named, (source, torch.float64))

    assert torch.autograd.gradcheck(embedded, parameters)


def test_an_unknown_value_embedding_is_refused():
    with pytest.raises(ValueError, match="kind='tables' is unknown; allowed: projection, table"):
        ValueEmbedding("tables", D_MODEL, 29, D)


def test_normed_queries_and_keys_keep_the_type_in_which_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA's autocast rms_norm returns fp32. Here a stand-in does so."""
    own = multihead.rms_norm
    monkeypatch.setattr(multihead, "rms_norm", lambda *given, **how: own(*given, **how).float())
    layer = MultiHeadAttention(12, 3, compatibility=ScaledDotProduct(), qk_norm_epsilon=1e-6).bfloat16()
    query, key, value, _ = layer.project(torch.randn(2, 5, 12, dtype=torch.bfloat16))
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"n_kv_head": 1, "qk_norm_epsilon": 1e-6},
        {"convolution": 3, "gate": "scalar", "exclusive": "fixed"},
    ],
)
def test_one_product_for_queries_keys_and_values_equals_three(options, monkeypatch):
    """As on a GPU: the same output, gradients and names of weights; and compiled it is one graph."""
    module, x = make(mask=causal(), **options), vectors(T).requires_grad_()
    products, linear = [], multihead.linear
    monkeypatch.setattr(multihead, "linear", lambda *inputs: products.append(inputs[1].shape[0]) or linear(*inputs))
    found = {}
    for fused in (False, True):
        monkeypatch.setattr(multihead, "one_product_is_faster", lambda x, fused=fused: fused)
        output = module(x)
        gradients = torch.autograd.grad(output.square().sum(), [x, *module.parameters()])
        found[fused] = [output, *gradients]
        assert products == ([module.query.out_features + 2 * module.key.out_features] if fused else [])
    for one, other in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert {name.split(".")[0] for name, _ in module.named_parameters()} >= {"query", "key", "value", "output"}
    monkeypatch.setattr(multihead, "linear", linear)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, found[True][0], rtol=1e-12, atol=1e-12)


def test_weights_side_by_side_are_not_put_together_again(monkeypatch):
    """For generation on a GPU: one copy of the weights, the same output, and no concatenation for each token."""
    monkeypatch.setattr(multihead, "one_product_is_faster", lambda x: True)
    module, x = make(mask=causal(), n_kv_head=1), vectors(T)
    expected = module(x)
    module.put_side_by_side()
    assert {each.weight.untyped_storage().data_ptr() for each in (module.query, module.key, module.value)} == {
        module.side_by_side.weight.untyped_storage().data_ptr()
    }
    with torch.profiler.profile() as profiled:
        output = module(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert "aten::cat" not in {event.key for event in profiled.key_averages()}


def test_one_product_is_for_plain_layers_and_self_attention(monkeypatch):
    """An adapter, a hook or a context of other vectors: each layer is called by itself."""
    monkeypatch.setattr(multihead, "one_product_is_faster", lambda x: True)
    module, x, seen = make(), vectors(T), []
    module.key.register_forward_hook(lambda layer, inputs, output: seen.append(output.shape))
    module(x)
    assert seen == [(B, T, D_MODEL)]

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    adapted = make()
    adapted.value.__class__ = Doubled
    torch.testing.assert_close(adapted(x), 2 * make()(x))
    plain = make()
    monkeypatch.setattr(multihead, "linear", lambda *inputs: pytest.fail("not in attention to a context"))
    plain(x, vectors(S))
