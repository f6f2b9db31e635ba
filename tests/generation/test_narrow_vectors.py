"""The decoding kernels with vectors of 4 numbers, as NEON's: the tests of test_packing.py once more.

On ARM the kernels have that width by themselves. Elsewhere the compiler is told to use no wider vectors.
"""

from __future__ import annotations

import platform

import pytest
from test_packing import (  # noqa: F401 (collected here too)
    forget,
    test_int8_linear,
    test_linear,
    test_one_token_after_another_while_the_window_slides,
    test_rms_norm,
    test_what_is_not_finite_stays_visible_in_8_bits,
)

from andrea.generation import packing
from andrea.runtime.native import REASONS

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="here vectors are narrow anyway")


@pytest.fixture(autouse=True, scope="module")
def narrow():
    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.setenv("CXX", "g++ -mno-avx")
        assert packing.library() is not None, REASONS
        yield
    forget()
