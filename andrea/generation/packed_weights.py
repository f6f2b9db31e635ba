"""A GPT packed for decoding: linear layers with packed weights, and our kernels for norms, attention and whole blocks.

Each decoding step uses every weight once, so its time is the time to read the weights from memory. On a CPU our own
kernels (decode.cpp) read bf16 matrices about twice as fast as torch does. They read int8 matrices at the same
number of bytes per second, so a product takes half as long. Without a compiler, weights in oneDNN's layout still save a
conversion at every call. In 4 bits, a weight takes 0.56 bytes with its share of a scale. bench/generate.py measures these speeds.

B texts, T new tokens, H query heads, G key/value heads, D = d_head.
"""

from __future__ import annotations

import abc
import copy
import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    ScoreModifiers,
    SharedInputs,
    alibi_slopes,
)
from andrea.attention.mask import Causal, SlidingWindow
from andrea.attention.multihead import is_plain, one_product_is_faster
from andrea.config import UserError
from andrea.model.gpt import ACTIVATIONS as MLP_ACTIVATIONS
from andrea.model.gpt import GPT, MLP, Position, RMSNorm, RotaryPosition, SwiGLU, softcap
from andrea.runtime.device import LargePages, cpu_multiplies_bf16
from andrea.runtime.native import COUNT, NUMBER, POINTER, address, compiled_library

# ---------------------------------------------------------------------------------------------------------- decode.cpp
# Its functions, and the C structures of their arguments.

SOURCE = Path(__file__).with_name("decode.cpp")
ACTIVATIONS = ("gelu", "relu2", "swiglu", "gelu_exact")  # in the order of `Activation` in decode.cpp


class Matrix(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("weight", "scale", "sums", "bias")]
    _fields_ += [(name, COUNT) for name in ("n_in", "n_out")]
    _fields_ += [("group_scale", POINTER)]


class Shape(ctypes.Structure):
    _fields_ = [(name, COUNT) for name in ("n_layer", "n_row", "d_model", "d_mlp", "n_head", "n_kv_head", "d_head")]
    _fields_ += [(name, COUNT) for name in ("capacity", "activation", "value_residual", "n_mixed", "parallel_residual")]
    _fields_ += [("lengths", POINTER)]
    _fields_ += [(name, NUMBER) for name in ("norm_epsilon", "qk_epsilon", "scale")]


class Scoring(ctypes.Structure):
    _fields_ = [("window", COUNT), ("slopes", POINTER), ("sinks", POINTER), ("cap", NUMBER)]
    _fields_ += [("query_norm", POINTER), ("key_norm", POINTER)]


class Layer(ctypes.Structure):
    _fields_ = [("attention_norm", POINTER), ("project", Matrix), ("output", Matrix)]
    _fields_ += [("mlp_norm", POINTER), ("gate", Matrix), ("up", Matrix), ("down", Matrix), ("head_gate", Matrix)]
    _fields_ += [
        ("own_share", POINTER),
        ("first_share", NUMBER),
        ("scoring", Scoring),
        ("taps", POINTER),
        ("projected", POINTER),
    ]


ARGUMENTS = {
    "linear": [ctypes.POINTER(Matrix), POINTER, POINTER, COUNT],
    "rms_norm": [POINTER] * 3 + [COUNT] * 2 + [NUMBER],
    "attend": [POINTER] * 5 + [COUNT] * 6 + [NUMBER] * 2 + [ctypes.POINTER(Scoring)],
    "convolve": [POINTER] * 3 + [COUNT] * 6,
    "decode": [POINTER] * 8 + [ctypes.POINTER(Shape)],
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@functools.cache
def library() -> ctypes.CDLL | None:
    functions = compiled_library(SOURCE)
    if functions is not None:
        for name, arguments in ARGUMENTS.items():
            for kind in NAMES.values():
                function = getattr(functions, f"{name}_{kind}")
                function.argtypes, function.restype = arguments, None
    return functions


def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    return getattr(library(), f"{name}_{NAMES[dtype]}")


# -------------------------------------------------------------------------------------------------------- linear layers
# With packed weights in bf16, fp32, int8 or int4, for our kernels or for oneDNN. Weights are (d_out, d_in), biases (d_out,),
# inputs (..., d_in).

# The longest row for the int8 kernel: a sum of this many products of a byte and an int8 fits 32 bits.
LONGEST_SUM = 2**31 // (127 * 255)
# Up to this number of rows our kernels are faster than torch's, by the type of the rows: measured on a processor with AVX512-bf16,
# with these instructions and held to AVX2 (bench/README.md).
FEW_ROWS = {torch.float32: 16, torch.bfloat16: 64}
# Beyond this number, torch's product in bf16 and the conversion of 8-bit weights take less time than our kernel.
MANY_ROWS = 256


def has_native(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in NAMES and library() is not None


def has_onednn(weight: Tensor) -> bool:
    """Whether the weights are bf16 on a CPU whose oneDNN multiplies in bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear, in fp32 on a CPU that does not multiply in bf16: there torch's bf16 products take five times as long."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or cpu_multiplies_bf16():
        return functional.linear(x, weight, bias)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()


class NativeLinear(nn.Module):
    """nn.Linear without gradients. Inputs of few rows use our kernel, larger inputs use torch's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: LargePages | None = None) -> None:
        super().__init__()
        self.weight = weight.detach().contiguous() if pages is None else pages.place(weight.detach())
        self.bias = None if bias is None else bias.detach()
        self.kernel = function("linear", weight.dtype)
        self.matrix = self.descriptor()

    def forward(self, x: Tensor) -> Tensor:
        n_in = self.weight.shape[1]
        assert x.shape[-1] == n_in and x.dtype == self.weight.dtype, (x.shape, x.dtype, self.weight.shape)
        n_row = x.numel() // n_in
        if n_row > FEW_ROWS[x.dtype]:
            return self.readable(x)
        return self.by_kernel(x)

    def by_kernel(self, x: Tensor) -> Tensor:
        """`forward` with our kernel for any number of rows. It computes a row the same way whatever the other rows are."""
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], len(self.weight))
        self.kernel(self.matrix, x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1])
        return y

    def readable(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def descriptor(self) -> Matrix:
        """The structure that the kernel takes. It is made once and reused: each token needs some hundred products."""
        n_out, n_in = self.weight.shape
        return Matrix(weight=address(self.weight), bias=address(self.bias), n_in=n_in, n_out=n_out)

    def rows(self, start: int, stop: int) -> NativeLinear:
        """A layer for outputs start .. stop-1, which shares the memory of this layer's weights."""
        part = copy.copy(self)
        part.weight, part.bias = self.weight[start:stop], None if self.bias is None else self.bias[start:stop]
        part.matrix = part.descriptor()
        return part


class OneDNNLinear(nn.Module):
    """nn.Linear without gradients, with the weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # torch.compile uses the same operators for frozen weights. The layout is for products of 1 row.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class TorchInt8Linear(nn.Module):
    """nn.Linear without gradients, with 8-bit weights as in `quantised`, for torch.compile and for the readable form."""

    kernel = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.scale = quantised(weight.detach())
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        n_row = x.numel() // self.weight.shape[1]
        is_for_few = torch.compiler.is_compiling() and n_row <= FEW_ROWS[x.dtype]
        return self.written_out(x) if is_for_few else self.readable(x)

    def readable(self, x: Tensor) -> Tensor:
        return linear(x, (self.weight * self.scale[:, None]).to(x.dtype), self.bias)

    def written_out(self, x: Tensor) -> Tensor:
        """The same as `readable`, for few rows: torch.compile turns this form into code that reads each weight once."""
        rows = x.flatten(0, -2).float()
        y = ((self.weight.float()[:, None] * rows).sum(-1) * self.scale[:, None]).mT  # (rows, d_out)
        y = y.to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias

    def rows(self, start: int, stop: int) -> TorchInt8Linear:
        """A layer for outputs start .. stop-1, which shares the memory of this layer's weights."""
        part = copy.copy(self)
        part.weight, part.scale = self.weight[start:stop], self.scale[start:stop]
        part.bias = None if self.bias is None else self.bias[start:stop]
        return part


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (d_out, d_in) -> int8 of the same shape, and scales (d_out,) fp32. The largest weight of a row becomes ±127."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


# The layouts of 8 and 4 bits in decode.cpp: rows that are kept together, and weights of a row that share a scale.
BLOCK, GROUP = 16, 32


class BlockLinear(nn.Module, abc.ABC):
    """Abstract: nn.Linear without gradients for our kernel, with weights of 8 or 4 bits in blocks of BLOCK rows.

    pack: weight (d_out, d_in) -> the tensors that the kernel takes, by their names in `Matrix`. The first dimension of each is
    blocks.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: LargePages | None = None) -> None:
        super().__init__()
        self.packed = self.pack(weight.detach())
        if pages is not None:
            self.packed = {name: pages.place(tensor) for name, tensor in self.packed.items()}
        self.bias = None if bias is None else bias.detach()
        self.dtype = weight.dtype  # type of inputs and outputs
        self.n_out, self.n_in = weight.shape
        self.n_skipped = 0  # rows of the first block before this layer's own
        self.kernel = function("linear", weight.dtype)
        self.matrix = self.descriptor()

    @abc.abstractmethod
    def pack(self, weight: Tensor) -> dict[str, Tensor]: ...

    @abc.abstractmethod
    def all_rows(self) -> Tensor:
        """The weights of all rows and columns of the blocks, fp32."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.n_in and x.dtype == self.dtype, (x.shape, x.dtype, self.n_in)
        return self.by_kernel(x)

    def by_kernel(self, x: Tensor) -> Tensor:
        """`forward`. It computes a row the same way whatever the other rows are."""
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.n_skipped + self.n_out)
        self.kernel(self.matrix, x.data_ptr(), y.data_ptr(), x.numel() // self.n_in)
        return y[..., self.n_skipped :]

    def readable(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.n_skipped :]
        return linear(x, self.dequantised().to(x.dtype), bias)

    def dequantised(self) -> Tensor:
        """The weights that the kernel uses, (d_out, d_in) fp32."""
        return self.all_rows()[self.n_skipped :][: self.n_out, : self.n_in]

    def descriptor(self) -> Matrix:
        """The structure that the kernel takes. It is made once and reused: each token needs some hundred products."""
        places = {name: address(tensor) for name, tensor in self.packed.items()}
        return Matrix(**places, bias=address(self.bias), n_in=self.n_in, n_out=self.n_skipped + self.n_out)

    def rows(self, start: int, stop: int) -> BlockLinear:
        """A layer for outputs start .. stop-1, which shares the memory of this layer's weights."""
        part = copy.copy(self)
        part.packed = {name: tensor[start // BLOCK : -(-stop // BLOCK)] for name, tensor in self.packed.items()}
        part.n_skipped, part.n_out = start % BLOCK, stop - start
        if self.bias is not None:
            part.bias = functional.pad(self.bias[start:stop], (part.n_skipped, 0))
        part.matrix = part.descriptor()
        return part


class Int8Linear(BlockLinear):
    """With 8-bit weights: weight ≈ int8 · scale of its row, rounded to nearest.

    Our kernel rounds x to 16-bit integers, which is more precise than bf16. Torch's products do not round x.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and x.numel() // self.n_in > MANY_ROWS and cpu_multiplies_bf16():
            return self.readable(x)
        return super().forward(x)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """weight (blocks, quads, BLOCK, 4) int8, scale (blocks, BLOCK) fp32, and the sums of each row (blocks, BLOCK) int32."""
        integers, scale = quantised(weight)
        n_new, n_quad = -len(weight) % BLOCK, -(-weight.shape[1] // 4)
        integers = functional.pad(integers, (0, -weight.shape[1] % 4, 0, n_new)).view(-1, BLOCK, n_quad, 4)
        sums, scale = integers.sum((2, 3), dtype=torch.int32), functional.pad(scale, (0, n_new)).view(-1, BLOCK)
        return {"weight": integers.transpose(1, 2).contiguous(), "scale": scale, "sums": sums}

    def all_rows(self) -> Tensor:
        quads = self.packed["weight"].view(torch.int32)[..., 0]  # (blocks, quads, BLOCK)
        integers = quads.mT.contiguous().view(torch.int8)  # (blocks, BLOCK, columns)
        return (integers * self.packed["scale"][..., None]).flatten(0, 1)


class Int4Linear(BlockLinear):
    """With 4-bit weights: weight ≈ integer · scale of its group.

    The kernel rounds each group of x to 8-bit integers, a 127th of the group's largest number apart. It serves any number
    of rows: its products are faster than torch's in bf16.
    """

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """weight (blocks, groups, 4, BLOCK, 4) uint8, each two integers plus 8, and group_scale (blocks, groups, BLOCK) bf16."""
        integers, scale = quantised_in_4_bits(weight)
        n_new, n_group = -len(weight) % BLOCK, scale.shape[1]
        q = functional.pad(integers + 8, (0, 0, 0, n_new), value=8).to(torch.uint8)
        q = q.view(-1, BLOCK, n_group, 4, 2, 4).permute(0, 2, 3, 4, 1, 5)  # (blocks, groups, 4, 2, BLOCK, 4)
        scale = functional.pad(scale, (0, 0, 0, n_new)).view(-1, BLOCK, n_group).mT.contiguous()
        return {"weight": (q[:, :, :, 0] | q[:, :, :, 1] << 4).contiguous(), "group_scale": scale}

    def all_rows(self) -> Tensor:
        weight, scale = self.packed["weight"], self.packed["group_scale"]
        halves = torch.stack([weight & 15, weight >> 4], dim=3)  # (blocks, groups, 4, 2, BLOCK, 4)
        integers = halves.permute(0, 4, 1, 2, 3, 5).flatten(2, 5) - 8.0  # (blocks, BLOCK, columns)
        return (integers * scale.float().mT.repeat_interleave(GROUP, dim=2)).flatten(0, 1)


def int8_linear(weight: Tensor, bias: Tensor | None, native: bool, pages: LargePages | None) -> nn.Module:
    """For our kernel if `native` and if the sums of a row fit its 32 bits; else for torch."""
    if native and weight.shape[1] <= LONGEST_SUM:
        return Int8Linear(weight, bias, pages)
    return TorchInt8Linear(weight, bias)


def quantised_in_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (d_out, d_in) -> integers -8 .. 7, (d_out, n · GROUP) int8, and scales (d_out, n) bf16. New columns are 0.

    The number of a group that is largest in size becomes -8, whatever its sign, so that all sixteen integers serve (ggml's
    q4_0). Better scales, found by search or from what the layers read (GPTQ), gain little: bench/README.md.
    """
    weight = functional.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = weight.gather(2, weight.abs().argmax(2, keepdim=True))  # (d_out, n, 1)
    scale = (largest / -8).bfloat16()
    steps = weight / torch.where(scale == 0, 1, scale.float())
    return steps.round().clamp(-8, 7).to(torch.int8).flatten(1), scale[..., 0]


# ------------------------------------------------------------------------------------------------------------ the model

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]  # weight (d_out, d_in) and bias (d_out,) -> a linear layer


class NativeRMSNorm(nn.Module):
    """RMSNorm without gradients. Inputs of few rows use our kernel, larger inputs use torch's."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm, self.epsilon = norm, norm.eps
        self.weight = norm.weight.detach().float().contiguous()
        self.kernel = function("rms_norm", norm.weight.dtype)
        self.weight_address = self.weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        n = len(self.weight)
        assert x.shape[-1] == n and x.dtype == self.norm.weight.dtype, (x.shape, x.dtype, n)
        n_row = x.numel() // n
        if n_row > FEW_ROWS[x.dtype]:
            return self.norm(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        self.kernel(x.data_ptr(), self.weight_address, y.data_ptr(), n_row, n, self.epsilon)
        return y


class NativeAttention(nn.Module):
    """Causal attention of one new token: one matrix product for query, key and value, then one kernel.

    For any other call the replaced module runs. Its projections share the packed weights.
    """

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
        self.rotary_table = position.table_bits.view(torch.float32) if isinstance(position, RotaryPosition) else None
        modifiers = attention.modifiers or ScoreModifiers()
        self.slopes = alibi_slopes(self.n_head, weight.device) if modifiers.alibi else None
        self.sinks = None if attention.sink is None else attention.sink.detach().float().contiguous()
        self.norms = [
            None if each is None else each.detach().float().contiguous()
            for each in (attention.query_norm, attention.key_norm)
        ]
        self.scoring = Scoring(
            window=attention.mask.width if isinstance(attention.mask, SlidingWindow) else 0,
            slopes=None if self.slopes is None else address(self.slopes),
            sinks=None if self.sinks is None else address(self.sinks),
            cap=modifiers.softcap or 0.0,
            query_norm=address(self.norms[0]),
            key_norm=address(self.norms[1]),
        )
        self.taps = None if attention.taps is None else attention.taps.detach().float().contiguous()
        self.own_share = None  # (H,)
        if attention.is_exclusive:
            learned = attention.exclusive_share
            self.own_share = torch.ones(self.n_head) if learned is None else learned.detach().float()
        self.convolve = function("convolve", weight.dtype)
        self.kernel = function("attend", weight.dtype)

    @staticmethod
    def serves(attention: MultiHeadAttention) -> bool:
        """Whether the kernel computes this attention."""
        plain = type(attention.compatibility) in (DotProduct, ScaledDotProduct)
        plain = plain and isinstance(attention.mask, (Causal, SlidingWindow))
        return plain and attention.d_head % 2 == 0 and attention.implementation != "reference"

    def forward(
        self,
        x: Tensor,
        *,
        shared: SharedInputs,
        cache: LayerCache | None = None,
        statistics: bool = False,
    ) -> Tensor | tuple[Tensor, HeadStatistics]:
        """The same as MultiHeadAttention.forward."""
        one_new = x.shape[1] == 1 and cache is not None and isinstance(cache.length, int)
        if not one_new or statistics:
            return self.attention(x, shared=shared, cache=cache, statistics=statistics)
        n_batch, d_head, capacity = len(x), self.attention.d_head, cache.keys.shape[2]
        assert cache.length < capacity, f"{cache.length + 1} tokens do not fit a cache with a capacity of {capacity}"
        assert shared.packing is None and cache.keys.dtype == x.dtype, (shared.packing, cache.keys.dtype, x.dtype)
        assert cache.keys.is_contiguous() and cache.values.is_contiguous() and len(cache.keys) == n_batch
        x = x.contiguous()
        three, retrieved = self.project(x), x.new_empty(n_batch, 1, self.n_head * d_head)
        if shared.first_value is not None or shared.value_source is not None:
            value = three[..., -self.n_kv_head * d_head :]
            value.copy_(self.attention.merged(self.attention.mixed(self.attention.heads(value), shared)))
        if self.taps is not None:
            n_heads, n_mixed = self.taps.shape[0], self.taps.shape[2]
            rows = address(three), address(cache.projected), address(self.taps)
            self.convolve(*rows, n_batch, n_heads, d_head, capacity, cache.length, n_mixed)
        tensors = (address(each) for each in (three, cache.keys, cache.values, self.rotary_table, retrieved))
        shape = n_batch, self.n_head, self.n_kv_head, d_head, capacity, cache.length
        self.kernel(*tensors, *shape, self.epsilon, self.scale, self.scoring)
        own_value = three[..., -self.n_kv_head * d_head :]
        z, own_value = self.attention.heads(retrieved), self.attention.heads(own_value)
        return self.attention.output(
            self.attention.merged(self.attention.finish(z, own_value, self.attention.gates(x)))
        )


class NativeBlocks:
    """All blocks and the final norm in one call of our kernel, for one new token per text.

    The blocks of the packed model, called one after another, give the same result for texts of equal length. They are the
    readable form of this kernel, which reads their weights. A text's result does not depend on the other texts.
    """

    def __init__(self, model: GPT) -> None:
        first, mlp, config = model.blocks[0].attention, model.blocks[0].mlp, model.config
        self.model, self.rotary_table, self.final_norm = model, first.rotary_table, model.final_norm.weight_address
        self.kernel = function("decode", model.embedding.weight.dtype)
        self.shape = functools.partial(
            Shape,
            n_layer=len(model.blocks),
            d_model=config.d_model,
            d_mlp=config.d_mlp,
            n_head=first.n_head,
            n_kv_head=first.n_kv_head,
            d_head=config.head_width,
            activation=ACTIVATIONS.index(activation_of(mlp)),
            value_residual=config.value_residual,
            n_mixed=config.qkv_convolution or 0,
            parallel_residual=config.parallel_residual,
            norm_epsilon=model.final_norm.epsilon,
            qk_epsilon=first.epsilon,
            scale=first.scale,
        )
        self.addresses: weakref.WeakKeyDictionary[KeyValueCache, list[list[int]]] = weakref.WeakKeyDictionary()
        self.layers = (Layer * len(model.blocks))()
        for layer, block in zip(self.layers, model.blocks, strict=True):
            layer.attention_norm, layer.mlp_norm = block.attention_norm.weight_address, block.mlp_norm.weight_address
            layer.project, layer.output = block.attention.project.matrix, block.attention.attention.output.matrix
            layer.up, layer.down = block.mlp.up.matrix, block.mlp.down.matrix
            layer.scoring = block.attention.scoring
            if config.value_residual:
                layer.first_share = float(torch.sigmoid(block.attention.attention.value_mix))
            if config.qkv_convolution:
                layer.taps = block.attention.taps.data_ptr()
            layer.own_share = address(block.attention.own_share)
            if block.attention.attention.gate is not None:
                layer.head_gate = block.attention.attention.gate.matrix
            if isinstance(block.mlp, SwiGLU):
                layer.gate = block.mlp.gate.matrix

    @staticmethod
    def serves(model: GPT) -> bool:
        """Whether the kernel computes every part of this packed model."""
        kinds = NativeLinear, BlockLinear, TorchInt8Linear
        linears = [module for module in model.modules() if isinstance(module, kinds)]
        norms = [model.final_norm, *(norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm))]
        return (
            all(isinstance(block.attention, NativeAttention) for block in model.blocks)
            and all(isinstance(norm, NativeRMSNorm) for norm in norms)
            and all(activation_of(block.mlp) in ACTIVATIONS for block in model.blocks)
            and all(linear.kernel is not None for linear in linears)
        )

    def fits(self, tokens: Tensor, cache: KeyValueCache | None) -> bool:
        """Whether the kernel supports these new tokens (B, T) with this cache."""
        one_each = tokens.shape[1] == 1 and len(tokens) <= FEW_ROWS[self.model.embedding.weight.dtype]
        return one_each and cache is not None and isinstance(cache.length, int)

    def __call__(self, tokens: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """tokens (B, 1) -> hidden (B, 1, d_model). The tokens' keys and values are appended to the caches.

        caches: of the B texts, in their order; a cache may hold several texts of equal length.
        """
        sizes = [len(cache.keys[0]) for cache in caches]
        x = self.embed(tokens, caches, sizes).contiguous()
        added = None
        if self.model.config.value_embedding is not None:
            # (L, B, 1, G D): what value embeddings add to the values of each layer; by text, so that no text affects another
            embeddings = [block.attention.attention.value_embedding for block in self.model.blocks]
            sources = [self.model.value_source(*each) for each in zip(tokens.split(1), x.split(1), strict=True)]
            rows = [torch.stack([each(source, x.dtype) for each in embeddings]) for source in sources]
            added = torch.cat(rows, dim=1)
        hidden, capacity, length = torch.empty_like(x), caches[0].capacity, max(cache.length for cache in caches)
        assert length < capacity, f"{length + 1} tokens do not fit a cache with a capacity of {capacity}"
        assert all((cache.keys[0].dtype, cache.capacity) == (x.dtype, capacity) for cache in caches), x.dtype
        lengths = [cache.length for cache, size in zip(caches, sizes, strict=True) for _ in range(size)]
        lengths = (ctypes.c_int64 * len(x))(*lengths)
        keys, values, projected = self.places(caches)
        for index, layer in enumerate(self.layers):  # `projected` is empty without a convolution
            layer.projected = ctypes.addressof(projected) + index * len(x) * ctypes.sizeof(POINTER)
        shape = self.shape(n_row=len(x), capacity=capacity, lengths=ctypes.addressof(lengths))
        rows = address(self.rotary_table), address(added), x.data_ptr(), hidden.data_ptr()
        self.kernel(self.layers, self.final_norm, keys, values, *rows, shape)
        for cache in caches:
            cache.advance(1)
        return hidden

    def embed(self, tokens: Tensor, caches: Sequence[KeyValueCache], sizes: list[int]) -> Tensor:
        """What `GPT.embed` gives for each cache by itself, (B, 1, d_model); for several caches in few operations."""
        if len(caches) == 1:
            return self.model.embed(tokens, caches[0])
        x = self.model.embedding(tokens)
        if self.model.bigram_embedding is not None:
            parts = zip(tokens.split(sizes), caches, strict=True)
            before = torch.cat([cache.append_tokens(part) for part, cache in parts])
            x = x + self.model.bigram_embedding(before, tokens)
        starts = [cache.length for cache, size in zip(caches, sizes, strict=True) for _ in range(size)]
        return self.model.position.add(x, torch.tensor(starts))

    def places(self, caches: Sequence[KeyValueCache]) -> list[ctypes.Array]:
        """The addresses of keys, values and convolution's rows: of text b in layer l at l * B + b."""
        for cache in caches:
            if cache not in self.addresses:
                kinds = cache.keys, cache.values, cache.projected
                assert all(each.is_contiguous() for kind in kinds for each in kind)
                self.addresses[cache] = [[addresses_of_texts(each) for each in kind] for kind in kinds]
        found = [self.addresses[cache] for cache in caches]
        flat = [
            [place for of_layer in zip(*kind, strict=True) for of_cache in of_layer for place in of_cache]
            for kind in zip(*found, strict=True)
        ]
        return [(ctypes.c_void_p * len(each))(*each) for each in flat]


def activation_of(mlp: nn.Module) -> str | None:
    """The name that the kernel uses for the MLP's activation; None if the kernel does not support this activation."""
    if isinstance(mlp, SwiGLU):
        return "swiglu"
    names = {activation: name for name, activation in MLP_ACTIVATIONS.items()}
    return names.get(getattr(mlp, "activation", None))


def addresses_of_texts(kept: Tensor) -> list[int]:
    """The address of each text's part of `kept` (B, …)."""
    return [kept.data_ptr() + text * kept.stride(0) * kept.element_size() for text in range(len(kept))]


class PackedGPT:
    """The part of GPT that decoding uses. The constructor modifies `model`: it replaces all matrices by packed ones.

    bits: 8 or 4, of each weight of a matrix, or None for the model's own type.
    """

    def __init__(self, model: GPT, bits: int | None, native: bool) -> None:
        pages = LargePages(bytes_of_matrices(model, bits)) if native else None
        make_linear: MakeLinear = functools.partial(NativeLinear, pages=pages) if native else OneDNNLinear
        if bits == 8:
            make_linear = functools.partial(int8_linear, native=native, pages=pages)
        elif bits == 4:
            make_linear = functools.partial(Int4Linear, pages=pages)
        self.head = make_linear(model.head_weight, None)
        if model.head is None and isinstance(self.head, NativeLinear):
            # A tied head and the embedding still share their memory.
            model.embedding.weight = nn.Parameter(self.head.weight, requires_grad=False)
        model.head = None
        for block in model.blocks:
            if native and NativeAttention.serves(block.attention):
                block.attention = NativeAttention(block.attention, model.position, make_linear)
            elif bits and one_product_is_faster(block.attention.query.weight):
                block.attention.put_side_by_side(make_linear)
        replace_parts(model, nn.Linear, lambda linear: make_linear(linear.weight, linear.bias))
        if native:
            replace_parts(model, RMSNorm, NativeRMSNorm)
        self.blocks = NativeBlocks(model) if native and NativeBlocks.serves(model) else None
        self.model = model
        self.config = model.config
        self.make_cache = model.make_cache

    def __call__(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if self.blocks is not None and self.blocks.fits(tokens, cache):
            return self.blocks(tokens, [cache])
        return self.model(tokens, cache)

    @property
    def writes_texts_together(self) -> bool:
        """Whether `next_logits` can be called: whether our kernels compute everything."""
        return self.blocks is not None and getattr(self.head, "kernel", None) is not None

    def next_logits(self, tokens: Tensor, caches: Sequence[KeyValueCache]) -> list[Tensor]:
        """The logits (1, V) after one new token (B, 1) of each text, which has a cache by itself and any length.

        They are, bit for bit, those of each text alone.
        """
        scores = self.head.by_kernel(self.blocks(tokens, caches)[:, 0]).split(1)
        cap = (
            self.config.logit_softcap
        )  # each row by itself: torch computes the last numbers of a tensor in another way
        return list(scores) if cap is None else [softcap(each, cap) for each in scores]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)


def pack(model: GPT, bits: int | None, compiled: bool) -> GPT | PackedGPT:
    """The model in its fastest form for decoding; the model itself if no packed form exists.

    bits: as in `PackedGPT`; 4 needs our kernels. compiled: whether torch.compile generates the kernels. In this case 8 bits
    are the only packed form. Raises UserError for 8 or 4 bits if the model has a class of the user's own.
    """
    weight = model.embedding.weight
    if not is_built_in(model):
        if bits:
            raise UserError(
                f"precision=int{bits} serves only the built-in MLPs and compatibility functions, and this model has one of your "
                "own; use precision=bf16"
            )
        return model
    native = not compiled and has_native(weight)
    assert bits != 4 or native, (compiled, weight.device)
    if bits or native or (not compiled and has_onednn(weight)):
        return PackedGPT(model, bits, native)
    if one_product_is_faster(weight):
        for block in model.blocks:
            if all(map(is_plain, (block.attention.query, block.attention.key, block.attention.value))):
                block.attention.put_side_by_side()
    return model


def is_built_in(model: GPT) -> bool:
    """Whether the model has no class of the user's own. Packing does not know how such a class uses its layers."""
    block = model.blocks[0]
    return type(block.mlp) in (MLP, SwiGLU) and type(block.attention.compatibility) in BUILT_IN.values()


def bytes_of_matrices(model: GPT, bits: int | None) -> int:
    """The number of bytes of all packed matrices, including the head's."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    weights += [model.head_weight] if model.head is None else []
    return sum(LargePages.aligned_bytes(n_byte) for weight in weights for n_byte in bytes_of(weight, bits))


def bytes_of(weight: Tensor, bits: int | None) -> list[int]:
    """The number of bytes of each tensor that keeps this matrix (d_out, d_in) in the packed model's large pages."""
    n_row = -(-len(weight) // BLOCK) * BLOCK
    if bits == 8:
        return [n_row * -(-weight.shape[1] // 4) * 4, n_row * 4, n_row * 4]
    if bits == 4:
        n_group = n_row * -(-weight.shape[1] // GROUP)
        return [n_group * GROUP // 2, n_group * 2]
    return [weight.nbytes]


def replace_parts(module: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Replace every part of this kind by what `make` makes of it."""
    for name, child in module.named_children():
        if isinstance(child, kind):
            setattr(module, name, make(child))
        else:
            replace_parts(child, kind, make)
