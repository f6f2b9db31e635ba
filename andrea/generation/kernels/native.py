"""The functions of decode.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from andrea.native import COUNT, NUMBER, POINTER, compiled

SOURCE = Path(__file__).with_name("decode.cpp")
ARGUMENTS = {
    "linear": [POINTER] * 4 + [COUNT] * 3,
    "linear_int8": [POINTER] * 6 + [COUNT] * 3,
    "rms_norm": [POINTER] * 3 + [COUNT] * 2 + [NUMBER],
    "attend": [POINTER] * 5 + [COUNT] * 6 + [NUMBER] * 2,
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@functools.cache
def library() -> ctypes.CDLL | None:
    functions = compiled(SOURCE)
    if functions is not None:
        for name, arguments in ARGUMENTS.items():
            for kind in NAMES.values():
                function = getattr(functions, f"{name}_{kind}")
                function.argtypes, function.restype = arguments, None
    return functions


def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    return getattr(library(), f"{name}_{NAMES[dtype]}")
