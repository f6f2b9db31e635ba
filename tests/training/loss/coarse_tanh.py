"""A tanh with as few exact bits as a GPU's own, for Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def coarse_tanh(u):
    """tanh(u) rounded to 10 of the 23 bits behind the point: off by up to 2^-11 of it, to either side."""
    t = 1 - 2 / (1 + tl.exp2(u * 2.8853900817779268))
    return ((t.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
