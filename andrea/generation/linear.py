"""Linear layers for decoding, with packed weights in bf16, fp32 or int8, for our kernels or for oneDNN.

Each decoding step uses every weight once, so its time is the time to read the weights from memory. On a CPU our own
kernels (kernels/decode.cpp) read bf16 matrices about twice as fast as torch does. They read int8 matrices at the same
number of bytes per second, so a product takes half as long. Without a compiler, weights in oneDNN's layout still save a
conversion at every call. bench/generate.py measures these speeds.

Weights are (d_out, d_in), biases (d_out,), inputs (..., d_in).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from andrea.generation.kernels.decode_cpp import NAMES, Matrix, function, library
from andrea.runtime.device import LargePages
from andrea.runtime.native import address

# The longest row for the int8 kernel: a sum of this many products of a byte and an int8 fits 32 bits.
LONGEST_SUM = 2**31 // (127 * 255)
# Up to this number of rows a product takes as long as reading its weights, and our kernels are faster than torch's.
FEW_ROWS = 8


def has_native(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in NAMES and library() is not None


def has_onednn(weight: Tensor) -> bool:
    """Whether the weights are bf16 on a CPU whose oneDNN multiplies in bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class NativeLinear(nn.Module):
    """nn.Linear without gradients. Inputs of at most FEW_ROWS rows use our kernel, larger inputs use torch's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: LargePages | None = None) -> None:
        super().__init__()
        self.weight = weight.detach().contiguous() if pages is None else pages.place(weight.detach())
        self.bias = None if bias is None else bias.detach()
        self.kernel = function("linear", weight.dtype)
        self.matrix = self.descriptor()

    def forward(self, x: Tensor) -> Tensor:
        n_out, n_in = self.weight.shape
        assert x.shape[-1] == n_in and x.dtype == self.weight.dtype, (x.shape, x.dtype, self.weight.shape)
        n_row = x.numel() // n_in
        if n_row > FEW_ROWS:
            return functional.linear(x, self.weight, self.bias)
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], n_out)
        self.kernel(self.matrix, x.data_ptr(), y.data_ptr(), n_row)
        return y

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


class Int8Linear(nn.Module):
    """nn.Linear without gradients, with 8-bit weights: weight ≈ int8 (d_out, d_in) · scale (d_out,), rounded to nearest.

    Our kernel rounds x to 16-bit integers, which is more precise than bf16. Torch's products do not round x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, native: bool, pages: LargePages | None = None) -> None:
        super().__init__()
        self.weight, self.scale = quantised(weight.detach())
        self.weight = self.weight if pages is None else pages.place(self.weight)
        self.sums = self.weight.sum(1, dtype=torch.int32)
        self.bias = None if bias is None else bias.detach()
        self.dtype = weight.dtype  # type of inputs and outputs
        fits = native and weight.shape[1] <= LONGEST_SUM
        self.kernel = function("linear", weight.dtype) if fits else None
        self.matrix = self.descriptor()

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

    def descriptor(self) -> Matrix:
        """The structure that the kernel takes. It is made once and reused: each token needs some hundred products."""
        places = map(address, (self.weight, self.scale, self.sums, self.bias))
        return Matrix(*places, n_in=self.weight.shape[1], n_out=self.weight.shape[0])

    def rows(self, start: int, stop: int) -> Int8Linear:
        """A layer for outputs start .. stop-1, which shares the memory of this layer's weights."""
        part = copy.copy(self)
        part.weight, part.scale, part.sums = (each[start:stop] for each in (self.weight, self.scale, self.sums))
        part.bias = None if self.bias is None else self.bias[start:stop]
        part.matrix = part.descriptor()
        return part

    def readable(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.weight * self.scale[:, None]).to(x.dtype), self.bias)

    def written_out(self, x: Tensor) -> Tensor:
        """The same as `readable`, for few rows: torch.compile turns this form into code that reads each weight once."""
        rows = x.flatten(0, -2).float()
        y = ((self.weight.float()[:, None] * rows).sum(-1) * self.scale[:, None]).mT  # (rows, d_out)
        y = y.to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (d_out, d_in) -> int8 of the same shape, and scales (d_out,) fp32. The largest weight of a row becomes ±127."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale
