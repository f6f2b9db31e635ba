"""The parts of a model packed for decoding: linear layers with packed weights, and norms.

Each decoding step uses every weight once, so its time is the time to read the weights from memory. On a CPU our own
kernels (decode.cpp) read bf16 matrices about twice as fast as torch does. They read int8 matrices at the same
number of bytes per second, so a product takes half as long. Without a compiler, weights in oneDNN's layout still save a
conversion at every call. In 4 bits, a weight takes 0.56 bytes with its share of a scale. bench/generate.py measures these speeds.
"""

from __future__ import annotations

import abc
import copy
import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from andrea.model.gpt import RMSNorm
from andrea.runtime.device import LargePages, cpu_multiplies_bf16
from andrea.runtime.native import COUNT, NUMBER, POINTER, address, compiled_library

# ---------------------------------------------------------------------------------------------------------- decode.cpp
# Its functions, and the C structures of their arguments.

SOURCE = Path(__file__).with_name("decode.cpp")


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
    _fields_ += [("own_share", POINTER), ("first_share", NUMBER), ("scoring", Scoring)]
    _fields_ += [("taps", POINTER), ("projected", POINTER)]


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


def bytes_of(weight: Tensor, bits: int | None) -> list[int]:
    """The number of bytes of each tensor that keeps this matrix (d_out, d_in) in the packed model's large pages."""
    n_row = -(-len(weight) // BLOCK) * BLOCK
    if bits == 8:
        return [n_row * -(-weight.shape[1] // 4) * 4, n_row * 4, n_row * 4]
    if bits == 4:
        n_group = n_row * -(-weight.shape[1] // GROUP)
        return [n_group * GROUP // 2, n_group * 2]
    return [weight.nbytes]


# ---------------------------------------------------------------------------------------------------------------- norms


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
