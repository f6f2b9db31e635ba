"""The decoding kernels as other processors run them: the tests of test_packed_weights.py once more.

The compiler is told to leave out instructions of this processor: vectors of 4 numbers, as NEON's; AVX2 alone; AVX512 without
products of bf16.
"""

from __future__ import annotations

import platform

import pytest
import torch
from test_packed_weights import (  # noqa: F401 (collected here too)
    forget,
    test_int4_linear,
    test_int8_linear,
    test_linear,
    test_one_token_after_another_while_the_window_slides,
    test_rms_norm,
    test_the_largest_sums_fit_in_4_bits,
    test_what_is_not_finite_stays_visible_in_8_bits,
)

from andrea.generation import packed_layers
from andrea.runtime.native import REASONS

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only the flags of x86 are known")
WITHOUT = {"narrow vectors": "-mno-avx", "AVX2": "-mno-avx512f", "no products of bf16": "-mno-avx512bf16"}


@pytest.fixture(autouse=True, scope="module", params=WITHOUT)
def other_processor(request):
    if "avx512" in WITHOUT[request.param] and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX512 to leave out")
    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.setenv("CXX", f"g++ {WITHOUT[request.param]}")
        assert packed_layers.library() is not None, REASONS
        yield
    forget()
