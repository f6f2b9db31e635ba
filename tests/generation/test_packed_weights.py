"""Weights laid out for decoding: each kernel against its readable twin, and the packed model against the model."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from head_options import ALL_OPTIONS
from test_engine import ATTENTION, CONFIG, LIKE_GPT2, TOKENIZER, make_model
from torch import Tensor
from torch.nn import functional

from andrea.attention import multihead
from andrea.generation import Engine, Request, Sampling, next_logits_uncached, packed_layers, packed_model
from andrea.generation.engine import Window, step
from andrea.generation.packed_layers import (
    BLOCK,
    FEW_ROWS,
    GROUP,
    Int4Linear,
    Int8Linear,
    NativeLinear,
    NativeRMSNorm,
    OneDNNLinear,
    TorchInt8Linear,
    has_onednn,
    int8_linear,
    quantised,
    quantised_in_4_bits,
)
from andrea.generation.packed_model import NativeAttention, PackedGPT, pack
from andrea.model.gpt import GPT, RMSNorm
from andrea.runtime.native import compiled_library

DTYPES = [torch.float32, torch.bfloat16]
FEW = FEW_ROWS[torch.float32]
SHARED_KEYS = dataclasses.replace(CONFIG, d_model=48, n_head=6, n_kv_head=2)  # heads of 8
CONFIGS = {
    "andrea": dataclasses.replace(
        CONFIG, d_model=60, n_head=3, d_mlp=67
    ),  # heads of 20: more than the lanes of a vector
    "gpt2": LIKE_GPT2,
    "shared keys": SHARED_KEYS,
    "exact gelu": dataclasses.replace(CONFIG, mlp="gelu_exact"),
    "gelu": dataclasses.replace(CONFIG, mlp="gelu", bias=True, qk_norm=False),
    "swiglu": dataclasses.replace(SHARED_KEYS, mlp="swiglu", position="none", logit_softcap=None),
    "first layer's values": dataclasses.replace(SHARED_KEYS, n_layer=3, value_residual=True),
    "convolution": dataclasses.replace(SHARED_KEYS, value_residual=True, qkv_convolution=3),
    "convolution, layernorm": dataclasses.replace(LIKE_GPT2, qkv_convolution=2),
    "first layer's values, layernorm": dataclasses.replace(LIKE_GPT2, n_layer=3, value_residual=True),
    "windows": dataclasses.replace(SHARED_KEYS, n_layer=3, rotary_share=0.5),
    "windows, layernorm": dataclasses.replace(LIKE_GPT2, n_layer=3),
    **{option: dataclasses.replace(SHARED_KEYS, **changes) for option, (changes, _) in ALL_OPTIONS.items()},
    "sink, layernorm": LIKE_GPT2,
    "side by side, layernorm": dataclasses.replace(LIKE_GPT2, parallel_residual=True),
    "weighted QK-norm, layernorm": dataclasses.replace(LIKE_GPT2, qk_norm="learned", d_head=6),
}
ATTENTIONS = dict.fromkeys(CONFIGS, ATTENTION)
ATTENTIONS |= dict.fromkeys(("windows", "windows, layernorm"), dataclasses.replace(ATTENTION, window=(3, None, 7)))
ATTENTIONS |= {option: dataclasses.replace(ATTENTION, **changes) for option, (_, changes) in ALL_OPTIONS.items()}
ATTENTIONS["sink, layernorm"] = dataclasses.replace(ATTENTION, sink=True)


@pytest.fixture(autouse=True)
def there_is_a_compiler():
    assert packed_layers.library() is not None, "g++ makes the kernels that are tested here; install it"


def judge(ours: Tensor, readable: Tensor, exact: Tensor) -> None:
    """At most twice the readable path's error, both against float64, plus a unit in the last place of the largest.

    In fp32 three units: how much torch's products err depends on the processor.
    """
    unit = (3 if readable.dtype == torch.float32 else 1) * exact.abs().max() * torch.finfo(readable.dtype).eps
    error, allowed = (ours.double() - exact).abs().max(), (readable.double() - exact).abs().max()
    assert error <= 2 * allowed + unit, (float(error), float(allowed), float(unit))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# -------------------------------------------------------------------------------------------------- kernel by kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 7, 3), (1, 16, 5), (3, 67, 131), (1, 197, 11), (16, 64, 2)])
def test_linear(dtype, bias, shape):
    n_row, n_in, n_out = shape
    x, weight = draw(n_row, n_in).to(dtype), draw(n_out, n_in).to(dtype)
    added = draw(n_out).to(dtype) if bias else None
    exact = functional.linear(x.double(), weight.double(), None if added is None else added.double())
    layer = NativeLinear(weight, added)
    judge(layer(x), functional.linear(x, weight, added), exact)
    judge(layer(x[None, :, None])[0, :, 0], functional.linear(x, weight, added), exact)
    judge(layer.rows(1, n_out)(x), functional.linear(x, weight, added)[:, 1:], exact[:, 1:])


@pytest.mark.parametrize("lead", [(1,), (1, 1), (FEW,), (1, FEW), (FEW + 1,), (2, FEW)])
def test_the_kernel_reads_few_rows_and_torch_reads_more(lead):
    layer, read = NativeLinear(draw(5, 3), None), []
    kernel, layer.kernel = layer.kernel, lambda *inputs: (read.append(inputs[-1]), kernel(*inputs))
    layer(draw(*lead, 3))
    n_row = math.prod(lead)
    assert read == ([n_row] if n_row <= FEW else [])


def test_int8_is_the_nearest_of_255_steps_of_each_row():
    weight = draw(13, 41) * torch.logspace(-6, 3, 13)[:, None]
    weight[4] = 0
    in_8_bits, scale = quantised(weight)
    assert in_8_bits.dtype == torch.int8 and (in_8_bits.abs().amax(1)[torch.arange(13) != 4] == 127).all()
    assert ((in_8_bits * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all() and not in_8_bits[4].any()


@pytest.mark.parametrize("shape", [(5, 7), (16, 32), (17, 66), (131, 67), (48, 96)])
def test_int8_weights_come_back_from_their_blocks(shape):
    """Also where neither side fills its blocks, and of a part whose first row is in the middle of a block."""
    integers, scale = quantised(weight := draw(*shape))
    expected, layer = integers * scale[:, None], Int8Linear(weight, None)
    assert torch.equal(layer.dequantised(), expected)
    assert torch.equal(layer.rows(3, shape[0] - 1).dequantised(), expected[3:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 67, 131), (1, 3072, 17), (16, 130, 9), (70, 96, 48)])
def test_int8_linear(dtype, bias, shape):
    """Of the same 8-bit weights. Our kernel rounds x to a 32767th of its largest entry, and then sums exactly."""
    n_row, n_in, n_out = shape
    x, weight = draw(n_row, n_in).to(dtype), draw(n_out, n_in).to(dtype)
    added = draw(n_out).to(dtype) if bias else None
    layer, of_torch = Int8Linear(weight, added), TorchInt8Linear(weight, added)
    kept = layer.dequantised().double()
    exact = functional.linear(x.double(), kept, None if added is None else added.double())
    judge(of_torch.written_out(x), of_torch.readable(x), exact)
    judge(layer.readable(x), of_torch.readable(x), exact)
    judge(of_torch.rows(1, n_out).readable(x), layer.readable(x)[:, 1:], exact[:, 1:])
    half_step = x.double().abs().amax(1, keepdim=True) / 32767 / 2 * 1.001
    in_16_bits = half_step * kept.abs().sum(1)  # (rows, d_out): the most that rounding x can do
    last_places = 4 * torch.finfo(dtype).eps * exact.abs().max()
    for part, rows in ((layer, slice(None)), (layer.rows(3, n_out), slice(3, None))):
        y = part.by_kernel(x)
        assert ((y.double() - exact[:, rows]).abs() <= in_16_bits[:, rows] + last_places).all()
        assert torch.equal(y, torch.cat([part.by_kernel(row[None]) for row in x]))  # whatever the other rows are
    if dtype == torch.bfloat16:
        judge(layer(x), layer.readable(x), exact)


def test_the_largest_sums_are_exact_in_8_bits():
    """Each product of 127 and ±32767 steps: 512 of them nearly fill 32 bits."""
    weight, x = torch.full((3, 1300), 127.0), torch.full((4, 1300), 32767.0)
    weight[1, 1:], x[1] = -127, -32767
    weight[2, ::2], x[2, ::2] = -127, -32767
    layer = Int8Linear(weight, None)
    assert torch.equal(layer.by_kernel(x), (x.double() @ weight.double().mT).float())


def test_int4_is_the_nearest_of_16_steps_of_each_group():
    weight = draw(13, 3 * GROUP) * torch.logspace(-6, 3, 13)[:, None]
    weight[4, GROUP:] = 0
    integers, scale = quantised_in_4_bits(weight)
    assert integers.dtype == torch.int8 and integers.shape == weight.shape and scale.shape == (13, 3)
    groups, kept = weight.unflatten(1, (3, GROUP)), integers.unflatten(1, (3, GROUP))
    assert (
        torch.equal(kept.amin(2) == -8, groups.any(2)) and kept.amax(2).max() == 7
    )  # the largest in size, of either sign
    step = scale.float()[..., None]
    is_cut = groups / step > 7  # no integer is as far on the other side of the largest
    assert ((kept * step - groups).abs() <= step.abs() * torch.where(is_cut, 1.05, 0.5001)).all()
    assert not kept[4, 1:].any() and (scale[4, 1:] == 0).all()


@pytest.mark.parametrize("shape", [(5, 7), (16, 32), (17, 64), (131, 67), (48, 96)])
def test_int4_weights_come_back_from_their_blocks(shape):
    """Also where neither side fills its blocks, and of a part whose first row is in the middle of a block."""
    integers, scale = quantised_in_4_bits(draw(*shape))
    expected = (integers * scale.float().repeat_interleave(GROUP, dim=1))[:, : shape[1]]
    layer = Int4Linear(draw(*shape), None)
    assert torch.equal(layer.dequantised(), expected)
    assert torch.equal(layer.rows(3, shape[0] - 1).dequantised(), expected[3:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 67, 131), (1, 3072, 17), (16, 130, 9), (70, 96, 48)])
def test_int4_linear(dtype, bias, shape):
    """Of the same 4-bit weights. Our kernel rounds x to a 127th of the largest number of its group, and then sums exactly."""
    n_row, n_in, n_out = shape
    x, weight = draw(n_row, n_in).to(dtype), draw(n_out, n_in).to(dtype)
    added = draw(n_out).to(dtype) if bias else None
    layer = Int4Linear(weight, added)
    kept = layer.dequantised().double()
    exact = functional.linear(x.double(), kept, None if added is None else added.double())
    groups = functional.pad(x.double(), (0, -n_in % GROUP)).unflatten(1, (-1, GROUP))
    half_step = groups.abs().amax(2) / 127 / 2 * 1.001  # (rows, groups)
    reach = half_step.repeat_interleave(GROUP, dim=1)[:, :n_in] @ kept.abs().mT  # the most that rounding x can do
    last_places = 4 * torch.finfo(dtype).eps * exact.abs().max()
    for part, rows in ((layer, slice(None)), (layer.rows(3, n_out), slice(3, None))):
        assert ((part(x).double() - exact[:, rows]).abs() <= reach[:, rows] + last_places).all()
        assert torch.equal(part(x), torch.cat([part(row[None]) for row in x]))  # whatever the other rows are
        judge(part.readable(x), functional.linear(x, kept.to(dtype), added)[:, rows], exact[:, rows])


@pytest.mark.parametrize("n_in", [GROUP, 2 * GROUP])
def test_the_largest_sums_fit_in_4_bits(n_in):
    """Each weight 15 - 8 or -8, each number of x ±127 steps: half a group of such products nearly fills 16 bits."""
    weight, x = torch.full((3, n_in), 7.0), torch.full((4, n_in), 127.0)
    weight[:, 0], weight[1, 1:], x[1] = -8, -8, -127
    weight[2, ::2], x[2, ::2] = -8, -127
    layer = Int4Linear(weight, None)
    assert torch.equal(layer(x), (x.double() @ layer.dequantised().double().mT).float())


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_in_bf16(bias, multiplies, monkeypatch):
    """torch's product, and that of fp32 rounded once, where the processor does not multiply in bf16."""
    monkeypatch.setattr("andrea.generation.packed_layers.cpu_multiplies_bf16", lambda: multiplies)
    x, weight, added = (draw(*shape).bfloat16() for shape in ((40, 67), (13, 67), (13,)))
    added = added if bias else None
    in_fp32 = functional.linear(x.float(), weight.float(), None if added is None else added.float())
    y = NativeLinear(weight, added)(x)
    assert torch.equal(y, functional.linear(x, weight, added) if multiplies else in_fp32.bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_in_8_bits(bad):
    for layer in (Int8Linear(draw(5, 67), None), Int4Linear(draw(5, 67), None)):
        x = draw(3, 67)
        x[1, 13] = bad
        x[2] = 0
        y = layer(x)
        assert y[0].isfinite().all() and y[1].isnan().all() and torch.equal(y[2], torch.zeros(5))


def test_sums_too_long_for_32_bits_are_torch_s():
    for n_in, by_kernel in ((66311, True), (66312, False)):
        layer = int8_linear(torch.ones(1, n_in), None, native=True, pages=None)
        assert (layer.kernel is not None) == by_kernel
        torch.testing.assert_close(layer(torch.ones(1, n_in)), torch.full((1, 1), float(n_in)), rtol=1e-4, atol=0)


def test_the_smallest_numbers_keep_their_signs_in_8_bits():
    x = torch.tensor([[1e-38, -1e-38, 3e-41, 0.0]])
    for layer in (Int8Linear(torch.eye(4), None), Int4Linear(torch.eye(4), None)):
        assert (layer(x).sign() * x.sign() >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [7, 16, 131])
def test_rms_norm(dtype, n):
    norm = RMSNorm(n, 1e-6)
    norm.weight.data = draw(n)
    norm, x = norm.to(dtype).requires_grad_(False), (3 * draw(2, 3, n)).to(dtype)
    exact = copy.deepcopy(norm).double()(x.double())
    judge(NativeRMSNorm(norm)(x), norm(x), exact)


# ---------------------------------------------------------------------------------------------------------- the model


def make_named(name: str) -> GPT:
    return make_model(CONFIGS[name], ATTENTIONS[name])


def rounded(model: GPT, bits: int | None) -> GPT:
    """The model in float64 with the weights that the packed one really has."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and not any(
                each in name for each in ("position", "embedding.weight", "table")
            )
            if is_matrix and (bits == 8 or bits == 4 and name == "head.weight"):
                in_8_bits, scale = quantised(parameter)
                parameter.copy_(in_8_bits * scale[:, None])
            elif is_matrix and bits == 4:
                parameter.copy_(Int4Linear(parameter, None).dequantised())
    return model.double()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_text", [1, 3])
def test_one_token_after_another_while_the_window_slides(name, dtype, n_text):
    """The packed model errs no more than the plain one of the same precision does, over all steps."""
    model = make_named(name).to(dtype)
    packed = pack(copy.deepcopy(model).requires_grad_(False), bits=None, compiled=False)
    assert isinstance(packed, PackedGPT) and isinstance(packed.model.blocks[0].attention, NativeAttention)
    tokens = torch.randint(0, 257, (n_text, 31), generator=torch.Generator().manual_seed(3))
    windows = [Window(each, step, n_text, fixed_shapes=False, ragged=False) for each in (packed, model)]
    double, results = rounded(model, bits=None), ([], [], [])
    for n_token in range(1, 31):
        texts = tokens[:, :n_token].tolist()
        for window, each in zip(windows, results, strict=False):
            each.append(window.next_logits(texts)[0][:, 0])
        results[2].append(next_logits_uncached(double, tokens[:, :n_token]))
    judge(*(torch.stack(each) for each in results))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(("n_text", "n_thread"), [(1, 1), (1, 3), (3, 1), (FEW, 3)])
def test_all_blocks_in_one_call_are_the_blocks_one_by_one(name, dtype, bits, n_text, n_thread):
    """The same products and the same roundings, so the same numbers but for torch's own exponentials and sums."""
    packed = pack(make_named(name).to(dtype).requires_grad_(False), bits=bits, compiled=False)
    if CONFIGS[name].norm == "layernorm":
        assert packed.blocks is None
        return
    torch.set_num_threads(n_thread)
    # What exclusion leaves of a vector is small where a token sees mostly itself, and differs in its last bits. A number on the
    # border of bf16, or of the 16 or 8 bits that a product in 8 or 4 bits reads, then becomes the next one.
    is_rounded_again = "exclusion" in name and (bits or dtype == torch.bfloat16)
    is_coarse = dtype == torch.bfloat16 or bits == 4
    close = {"atol": 3e-2 if bits == 4 else 1e-2 if is_coarse else 1e-3, "rtol": 2e-2} if is_rounded_again else {}
    if bits == 8 and dtype == torch.float32 and not is_rounded_again:  # one step of 16 bits
        close = {"atol": 1e-4, "rtol": 1e-3}
    if name == "exact gelu" and dtype == torch.float32:  # torch's own is off by 1.2e-6 at inputs up to 6, ours by 4e-7
        close = {"atol": 2e-4, "rtol": 1e-4}
    caches = [packed.make_cache(n_text, 8) for _ in range(2)]
    tokens = torch.randint(0, 257, (n_text, 8), generator=torch.Generator().manual_seed(3))
    for each in tokens.split(1, dim=1):
        assert packed.blocks.fits(each, caches[0])
        ours, twin = packed(each, caches[0]), packed.model(each, caches[1])
        torch.testing.assert_close(ours, twin, **close)
    assert caches[0].length == caches[1].length == 8
    for kept, of_twin in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True):
        torch.testing.assert_close(kept, of_twin, **close)
    assert not packed.blocks.fits(tokens[:, :2], caches[0])
    assert not packed.blocks.fits(torch.zeros(FEW_ROWS[torch.bfloat16] + 1, 1, dtype=torch.int64), caches[0])
    with pytest.raises(AssertionError, match="9 tokens do not fit a cache with a capacity of 8"):
        packed(each, caches[0])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["andrea", "shared keys", *ALL_OPTIONS])
def test_a_model_in_few_bits_is_the_model_of_its_rounded_weights(name, bits):
    model = make_named(name)
    packed = pack(copy.deepcopy(model).requires_grad_(False), bits=bits, compiled=False)
    assert isinstance(packed.head, Int8Linear)
    tokens = torch.randint(0, 257, (1, 9), generator=torch.Generator().manual_seed(3))
    double = rounded(model, bits=bits)
    share = {8: 2e-3, 4: 5e-2}[bits]  # x in 16 bits, and in 8
    window = Window(packed, step, 1, fixed_shapes=False, ragged=False)
    for n_token in range(1, 10):
        logits, _ = window.next_logits(tokens[:, :n_token].tolist())
        exact = next_logits_uncached(double, tokens[:, :n_token])
        assert (logits[:, 0].double() - exact).abs().max() <= share * exact.abs().max()


def test_a_tied_head_and_the_embedding_are_one_memory():
    packed = pack(make_model(LIKE_GPT2).to(torch.bfloat16).requires_grad_(False), bits=None, compiled=False)
    assert packed.model.embedding.weight.data_ptr() == packed.head.weight.data_ptr()
    assert not any(parameter.requires_grad for parameter in packed.model.parameters())


@pytest.mark.parametrize("compiler", [True, False])
def test_compiled_decoding_packs_in_8_bits_alone(compiler, monkeypatch):
    """Whether or not there are kernels that would serve."""
    if not compiler:
        monkeypatch.setattr(packed_model, "has_native", lambda weight: False)
    for dtype in DTYPES:
        model = make_model(dataclasses.replace(CONFIG, n_layer=1)).to(dtype).requires_grad_(False)
        assert pack(model, bits=None, compiled=True) is model
        assert isinstance(pack(copy.deepcopy(model), bits=8, compiled=True), PackedGPT)
        kernels = compiler or has_onednn(model.embedding.weight)
        assert isinstance(pack(copy.deepcopy(model), bits=None, compiled=False), PackedGPT) == kernels


def test_on_a_card_matrices_of_8_bits_have_one_product_for_queries_keys_and_values(monkeypatch):
    """As plain ones have: the same texts, from modules that share their memory."""
    model, tokens = make_model(LIKE_GPT2).requires_grad_(False), torch.arange(7)[None]
    expected = PackedGPT(copy.deepcopy(model), bits=8, native=False)(tokens)
    for module in (packed_model, multihead):
        monkeypatch.setattr(module, "one_product_is_faster", lambda x: True)
    packed = PackedGPT(model, bits=8, native=False)
    for block in packed.model.blocks:
        attention = block.attention
        storages = {
            each.weight.untyped_storage().data_ptr() for each in (attention.query, attention.key, attention.value)
        }
        assert storages == {attention.side_by_side.weight.untyped_storage().data_ptr()}
    called = []
    monkeypatch.setattr(
        packed_layers.TorchInt8Linear, "forward", lambda self, x: called.append(self) or self.readable(x)
    )
    assert torch.allclose(packed(tokens), expected, atol=1e-5)
    for block in packed.model.blocks:
        assert block.attention.side_by_side in called and block.attention.query not in called


def test_memory_is_shared_by_the_stacked_projections_and_their_parts():
    for bits in (None, 8, 4):
        packed = pack(make_model(SHARED_KEYS).requires_grad_(False), bits=bits, compiled=False)
        attention = packed.model.blocks[1].attention
        stacked, *parts = (
            layer.packed["weight"].flatten(1) if bits else layer.weight
            for layer in (
                attention.project,
                *(getattr(attention.attention, name) for name in ("query", "key", "value")),
            )
        )
        in_block = BLOCK if bits else 1
        assert [len(part) * in_block for part in parts] == [48, 16, 16] and len(stacked) * in_block == 80
        assert {part.untyped_storage().data_ptr() for part in parts} == {stacked.untyped_storage().data_ptr()}


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("guess", [0, 3])
def test_what_is_written_alone_is_written_in_a_batch(bits, guess):
    """One row goes through the attention kernel, several texts of different lengths through torch's."""
    engine = Engine(make_model(), TOKENIZER, dtype=torch.float32, bits=bits)
    prompts = [[1, 2, 3], [7, 8, 7, 8, 7], [5]]
    request = Request(max_new_tokens=23, sampling=Sampling(temperature=0), lookahead=guess)
    alone = [[piece.token for piece in engine.stream(prompt, request)] for prompt in prompts]
    together: list[list[int]] = [[] for _ in prompts]
    for piece in engine.stream_all(prompts, request):
        together[piece.sample].append(piece.token)
    assert together == alone
    if bits is None:
        plain = Engine(make_model(), TOKENIZER)
        assert alone == [[piece.token for piece in plain.stream(prompt, request)] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.untraced
def test_compiled_int8_writes_what_the_kernel_writes():
    request = Request(max_new_tokens=9, sampling=Sampling(temperature=0))
    texts = []
    for on in (False, True):
        engine = Engine(make_model(), TOKENIZER, dtype=torch.float32, bits=8, compiled=on)
        texts.append([piece.token for piece in engine.stream([1, 2], request)])
    assert texts[0] == texts[1]


def test_attention_that_no_kernel_serves_keeps_torch_s():
    for changed in (
        dataclasses.replace(ATTENTION, implementation="reference"),
        dataclasses.replace(ATTENTION, compatibility="bilinear"),
    ):
        model = GPT(CONFIG, changed, TOKENIZER.n_vocab)
        packed = pack(model.requires_grad_(False), bits=None, compiled=False)
        assert not isinstance(packed.model.blocks[0].attention, NativeAttention)
        assert isinstance(packed.model.blocks[0].attention.query, NativeLinear)


# ------------------------------------------------------------------------------------------------------- the compiler


@pytest.fixture
def fresh_library():
    forget()
    yield
    forget()


def forget():
    packed_layers.library.cache_clear()
    compiled_library.cache_clear()


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
@pytest.mark.filterwarnings("ignore:decode.cpp was not compiled")
def test_without_a_compiler_decoding_is_torch_s(compiler, fresh_library, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    assert packed_layers.library() is None
    request = Request(max_new_tokens=9, sampling=Sampling(temperature=0))
    for dtype in DTYPES:
        engine = Engine(make_model(), TOKENIZER, dtype=dtype)
        plain = Engine(make_model().to(dtype), TOKENIZER)
        onednn = dtype == torch.bfloat16 and has_onednn(plain.model.embedding.weight)
        assert isinstance(engine.model, PackedGPT) == onednn
        assert not onednn or isinstance(engine.model.head, OneDNNLinear)
        assert engine.write("ab", request) == plain.write("ab", request)
    assert list(tmp_path.rglob("*.so")) == []


def test_a_cache_that_cannot_be_written_is_done_without(fresh_library, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert packed_layers.library() is not None
    layer = NativeLinear(draw(5, 3), None)
    torch.testing.assert_close(layer(draw(1, 3)), draw(1, 3) @ draw(5, 3).mT)
