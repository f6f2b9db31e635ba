"""Weights laid out once for decoding.

At one token a step a matrix is read once and used once: time is memory traffic. On a CPU our own kernels
(kernels/decode.cpp) read bf16 matrices about twice as fast as torch, and int8 ones at the same rate, which are half as
long; without a compiler, oneDNN's own layout at least spares torch converting at every call (bench/generate.py).
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from andrea.attention import (
    BUILT_IN,
    DotProduct,
    HeadStatistics,
    KeyValueCache,
    LayerCache,
    MultiHeadAttention,
    ScaledDotProduct,
    SharedInputs,
)
from andrea.attention.mask import Causal
from andrea.config import UserError
from andrea.generation.kernels.native import ACTIVATIONS, NAMES, Layer, Matrix, Shape, function, library
from andrea.model.gpt import GPT
from andrea.model.layers import MLP, RMSNorm, SwiGLU, gelu, relu_squared, softcap
from andrea.model.positions import Position, RotaryPosition
from andrea.runtime.device import LargePages
from andrea.runtime.native import address

LONGEST_SUM = 2**31 // (127 * 255)  # products of a byte and an int8 that surely fit our kernel's 32 bits
FEW_ROWS = 8  # up to so many, a product reads its weights at most as often as it computes with them

# Of weight (d_out, d_in) and bias: x (..., d_in) -> (..., d_out).
MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]


def has_native(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in NAMES and library() is not None


def has_onednn(weight: Tensor) -> bool:
    """bf16 weights on a CPU whose oneDNN multiplies in bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class NativeLinear(nn.Module):
    """nn.Linear without gradients; few rows go through our kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: LargePages | None = None) -> None:
        super().__init__()
        self.weight = weight.detach().contiguous() if pages is None else pages.place(weight.detach())
        self.bias = None if bias is None else bias.detach()
        self.kernel = function("linear", weight.dtype)
        self.matrix = self.described()

    def forward(self, x: Tensor) -> Tensor:
        n_out, n_in = self.weight.shape
        assert x.shape[-1] == n_in and x.dtype == self.weight.dtype, (x.shape, x.dtype, self.weight.shape)
        n_row = x.numel() // n_in
        if n_row > FEW_ROWS:
            return functional.linear(x, self.weight, self.bias)
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], n_out)
        self.kernel(self.matrix, x.data_ptr(), y.data_ptr(), n_row)
        return y

    def described(self) -> Matrix:
        """For the kernel; asked for once, because a token has some hundred products."""
        n_out, n_in = self.weight.shape
        return Matrix(weight=address(self.weight), bias=address(self.bias), n_in=n_in, n_out=n_out)

    def rows(self, start: int, stop: int) -> NativeLinear:
        """A part of the output, with a part of the same weights."""
        part = copy.copy(self)
        part.weight, part.bias = self.weight[start:stop], None if self.bias is None else self.bias[start:stop]
        part.matrix = part.described()
        return part


class OneDNNLinear(nn.Module):
    """nn.Linear without gradients, its weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # The operators that torch.compile itself uses for frozen weights; 1 is the number of rows it is laid out for.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """nn.Linear without gradients, its weight in 8 bits: weight ≈ int8 (d_out, d_in) · scale (d_out,), to the nearest.

    Our kernel takes x in 16 bits, finer than bf16; what torch computes takes it as it is.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, native: bool, pages: LargePages | None = None) -> None:
        super().__init__()
        self.weight, self.scale = quantised(weight.detach())
        self.weight = self.weight if pages is None else pages.place(self.weight)
        self.sums = self.weight.sum(1, dtype=torch.int32)
        self.bias = None if bias is None else bias.detach()
        self.dtype = weight.dtype  # of what goes in and comes out
        fits = native and weight.shape[1] <= LONGEST_SUM
        self.kernel = function("linear", weight.dtype) if fits else None
        self.matrix = self.described()

    def forward(self, x: Tensor) -> Tensor:
        n_out, n_in = self.weight.shape
        assert x.shape[-1] == n_in and x.dtype == self.dtype, (x.shape, x.dtype, self.weight.shape)
        n_row = x.numel() // n_in
        if n_row > FEW_ROWS:
            return self.readable(x)
        if self.kernel is None:
            return self.written_out(x) if torch.compiler.is_compiling() else self.readable(x)
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], n_out)
        self.kernel(self.matrix, x.data_ptr(), y.data_ptr(), n_row)
        return y

    def described(self) -> Matrix:
        """For the kernel; asked for once, because a token has some hundred products."""
        places = map(address, (self.weight, self.scale, self.sums, self.bias))
        return Matrix(*places, n_in=self.weight.shape[1], n_out=self.weight.shape[0])

    def rows(self, start: int, stop: int) -> Int8Linear:
        """A part of the output, with a part of the same weights."""
        part = copy.copy(self)
        part.weight, part.scale, part.sums = (each[start:stop] for each in (self.weight, self.scale, self.sums))
        part.bias = None if self.bias is None else self.bias[start:stop]
        part.matrix = part.described()
        return part

    def readable(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.weight * self.scale[:, None]).to(x.dtype), self.bias)

    def written_out(self, x: Tensor) -> Tensor:
        """The same for few rows, so that torch.compile reads each weight once, in 8 bits."""
        rows = x.flatten(0, -2).float()
        y = ((self.weight.float()[:, None] * rows).sum(-1) * self.scale[:, None]).mT  # (rows, d_out)
        y = y.to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (d_out, d_in) -> int8 of the same shape and its rows' scales (d_out,) fp32: the largest becomes ±127."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


class NativeRMSNorm(nn.Module):
    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm, self.epsilon = norm, norm.eps
        self.weight = norm.weight.detach().float().contiguous()
        self.kernel = function("rms_norm", norm.weight.dtype)
        self.place = self.weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        n = len(self.weight)
        assert x.shape[-1] == n and x.dtype == self.norm.weight.dtype, (x.shape, x.dtype, n)
        n_row = x.numel() // n
        if n_row > FEW_ROWS:
            return self.norm(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        self.kernel(x.data_ptr(), self.place, y.data_ptr(), n_row, n, self.epsilon)
        return y


class NativeAttention(nn.Module):
    """Causal attention of one new token in one kernel, its three projections in one product; the module's own otherwise."""

    def __init__(self, attention: MultiHeadAttention, position: Position, make_linear: MakeLinear) -> None:
        super().__init__()
        three = attention.query, attention.key, attention.value
        n_query, n_key = attention.query.out_features, attention.key.out_features
        self.n_head, self.n_kv_head = n_query // attention.d_head, n_key // attention.d_head
        weight = torch.cat([each.weight.detach() for each in three])
        bias = None if three[0].bias is None else torch.cat([each.bias.detach() for each in three])
        self.project = make_linear(weight, bias)  # (..., d_model) -> (..., (H + 2G) D)
        attention.query = self.project.rows(0, n_query)
        attention.key = self.project.rows(n_query, n_query + n_key)
        attention.value = self.project.rows(n_query + n_key, n_query + 2 * n_key)
        attention.output = make_linear(attention.output.weight, attention.output.bias)
        self.attention = attention
        self.values = attention.values
        self.epsilon = -1.0 if attention.qk_norm_epsilon is None else attention.qk_norm_epsilon
        self.scale = attention.d_head**-0.5 if isinstance(attention.compatibility, ScaledDotProduct) else 1.0
        self.turns = position.table_bits.view(torch.float32) if isinstance(position, RotaryPosition) else None
        self.kernel = function("attend", weight.dtype)

    @staticmethod
    def serves(attention: MultiHeadAttention) -> bool:
        plain = type(attention.compatibility) in (DotProduct, ScaledDotProduct) and isinstance(attention.mask, Causal)
        return plain and attention.d_head % 2 == 0 and attention.implementation != "reference"

    def forward(
        self,
        x: Tensor,
        *,
        shared: SharedInputs,
        cache: LayerCache | None = None,
        statistics: bool = False,
    ) -> Tensor | tuple[Tensor, HeadStatistics]:
        """As MultiHeadAttention.forward."""
        one_new = x.shape[1] == 1 and cache is not None and isinstance(cache.length, int)
        if not one_new or statistics:
            return self.attention(x, shared=shared, cache=cache, statistics=statistics)
        n_batch, d_head, n_room = len(x), self.attention.d_head, cache.keys.shape[2]
        assert cache.length < n_room, f"{cache.length + 1} tokens do not fit a cache with room for {n_room}"
        assert shared.packing is None and cache.keys.dtype == x.dtype, (shared.packing, cache.keys.dtype, x.dtype)
        assert cache.keys.is_contiguous() and cache.values.is_contiguous() and len(cache.keys) == n_batch
        x = x.contiguous()
        three, retrieved = self.project(x), torch.empty_like(x)
        if shared.first_value is not None:
            value = three[..., -self.n_kv_head * d_head :]
            value.copy_(
                self.attention.mixed(self.attention.heads(value), shared.first_value).transpose(1, 2).flatten(2)
            )
        turn = None if self.turns is None else address(self.turns[cache.length])
        tensors = address(three), address(cache.keys), address(cache.values), turn, address(retrieved)
        shape = n_batch, self.n_head, self.n_kv_head, d_head, n_room, cache.length
        self.kernel(*tensors, *shape, self.epsilon, self.scale)
        return self.attention.output(retrieved)


class NativeBlocks:
    """All blocks and the final norm in one call of our kernel, for one new token of each of a few texts of one length.

    Its readable twin is the packed model itself, whose memory it shares.
    """

    def __init__(self, model: GPT) -> None:
        first, mlp, config = model.blocks[0].attention, model.blocks[0].mlp, model.config
        self.model, self.turns, self.final_norm = model, first.turns, model.final_norm.place
        self.kernel = function("decode", model.embedding.weight.dtype)
        self.shape = functools.partial(
            Shape,
            n_layer=len(model.blocks),
            d_model=config.d_model,
            d_mlp=config.d_mlp,
            n_head=first.n_head,
            n_kv_head=first.n_kv_head,
            d_head=config.d_head,
            activation=ACTIVATIONS.index(activation_of(mlp)),
            value_residual=config.value_residual,
            norm_epsilon=model.final_norm.epsilon,
            qk_epsilon=first.epsilon,
            scale=first.scale,
        )
        self.layers = (Layer * len(model.blocks))()
        for layer, block in zip(self.layers, model.blocks, strict=True):
            layer.attention_norm, layer.mlp_norm = block.attention_norm.place, block.mlp_norm.place
            layer.project, layer.output = block.attention.project.matrix, block.attention.attention.output.matrix
            layer.up, layer.down = block.mlp.up.matrix, block.mlp.down.matrix
            if config.value_residual:
                layer.first_share = float(torch.sigmoid(block.attention.attention.value_mix))
            if isinstance(block.mlp, SwiGLU):
                layer.gate = block.mlp.gate.matrix

    @staticmethod
    def serves(model: GPT) -> bool:
        """Whether every part of the packed model is one that the kernel knows."""
        linears = [module for module in model.modules() if isinstance(module, (NativeLinear, Int8Linear))]
        norms = [model.final_norm, *(norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm))]
        return (
            all(isinstance(block.attention, NativeAttention) for block in model.blocks)
            and all(isinstance(norm, NativeRMSNorm) for norm in norms)
            and all(activation_of(block.mlp) in ACTIVATIONS for block in model.blocks)
            and all(linear.kernel is not None for linear in linears)
        )

    def fits(self, tokens: Tensor, cache: KeyValueCache | None) -> bool:
        one_each = tokens.shape[1] == 1 and len(tokens) <= FEW_ROWS
        return one_each and cache is not None and isinstance(cache.length, int)

    def __call__(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """tokens (B, 1), the cache of those before, to which theirs is appended -> hidden (B, 1, d_model)."""
        x = self.model.position.add(self.model.embedding(tokens), cache.length).contiguous()
        hidden, kept = torch.empty_like(x), cache.keys[0]
        n_room = cache.n_room
        assert cache.length < n_room, f"{cache.length + 1} tokens do not fit a cache with room for {n_room}"
        assert kept.dtype == x.dtype and len(kept) == len(x), (kept.dtype, x.dtype, kept.shape, x.shape)
        assert all(each.is_contiguous() for each in (*cache.keys, *cache.values))
        shape = self.shape(n_row=len(x), n_room=n_room, length=cache.length)
        keys, values = (addresses(each) for each in (cache.keys, cache.values))
        turn = None if self.turns is None else self.turns[cache.length].data_ptr()
        self.kernel(self.layers, self.final_norm, keys, values, turn, x.data_ptr(), hidden.data_ptr(), shape)
        cache.advance(1)
        return hidden


def activation_of(mlp: nn.Module) -> str | None:
    """As the kernel calls it; None for one that it does not know."""
    if isinstance(mlp, SwiGLU):
        return "swiglu"
    return {relu_squared: "relu2", gelu: "gelu"}.get(getattr(mlp, "activation", None))


def addresses(tensors: list[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))


class PackedGPT:
    """The part of GPT that decoding uses; takes the model over and replaces its matrices, the head's included."""

    def __init__(self, model: GPT, int8: bool, native: bool) -> None:
        pages = LargePages(bytes_of_matrices(model, int8)) if native else None
        make_linear: MakeLinear = functools.partial(NativeLinear, pages=pages) if native else OneDNNLinear
        if int8:
            make_linear = functools.partial(Int8Linear, native=native, pages=pages)
        self.head = make_linear(model.head_weight, None)
        if model.head is None and isinstance(self.head, NativeLinear):
            model.embedding.weight = nn.Parameter(self.head.weight, requires_grad=False)  # tied: one memory for both
        model.head = None
        for block in model.blocks:
            if native and NativeAttention.serves(block.attention):
                block.attention = NativeAttention(block.attention, model.position, make_linear)
        replace_linears(model, make_linear)
        if native:
            replace_norms(model)
        self.blocks = NativeBlocks(model) if native and NativeBlocks.serves(model) else None
        self.model = model
        self.config = model.config
        self.make_cache = model.make_cache

    def __call__(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if self.blocks is not None and self.blocks.fits(tokens, cache):
            return self.blocks(tokens, cache)
        return self.model(tokens, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)


def pack(model: GPT, int8: bool, compiled: bool) -> GPT | PackedGPT:
    """The model as it decodes fastest, or as it is where there is no layout for it; torch.compile makes kernels itself."""
    weight = model.embedding.weight
    if not is_built_in(model):
        if int8:
            raise UserError("precision=int8 serves the built-in MLPs and compatibility functions; use precision=bf16")
        return model
    native = not compiled and has_native(weight)
    if int8 or native or (not compiled and has_onednn(weight)):
        return PackedGPT(model, int8, native)
    return model


def is_built_in(model: GPT) -> bool:
    """Whether the model has no class of the user's own, whose layers are called in ways that are not known here."""
    block = model.blocks[0]
    return type(block.mlp) in (MLP, SwiGLU) and type(block.attention.compatibility) in BUILT_IN.values()


def bytes_of_matrices(model: GPT, int8: bool) -> int:
    """What their packed weights need, the head's included."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    weights += [model.head_weight] if model.head is None else []
    return sum(LargePages.aligned_bytes(weight.numel() if int8 else weight.nbytes) for weight in weights)


def replace_linears(module: nn.Module, make_linear: MakeLinear) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make_linear(child.weight, child.bias))
        else:
            replace_linears(child, make_linear)


def replace_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, RMSNorm):
            setattr(module, name, NativeRMSNorm(child))
        elif not isinstance(child, NativeRMSNorm):
            replace_norms(child)
