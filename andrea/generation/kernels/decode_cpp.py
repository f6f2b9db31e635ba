"""The functions of decode.cpp for Python, and the C structures of their arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from andrea.runtime.native import COUNT, NUMBER, POINTER, compiled_library

SOURCE = Path(__file__).with_name("decode.cpp")
ACTIVATIONS = ("gelu", "relu2", "swiglu", "gelu_exact")  # in the order of `Activation` in decode.cpp


class Matrix(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("weight", "scale", "sums", "bias")]
    _fields_ += [(name, COUNT) for name in ("n_in", "n_out")]


class Shape(ctypes.Structure):
    _fields_ = [(name, COUNT) for name in ("n_layer", "n_row", "d_model", "d_mlp", "n_head", "n_kv_head", "d_head")]
    _fields_ += [
        (name, COUNT) for name in ("capacity", "length", "activation", "value_residual", "n_mixed", "parallel_residual")
    ]
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
