"""Matrix products of compiled code in fp32, by our C++ (product.cpp), on processors where torch's are slower.

torch calls Intel's MKL, which does about 60 % of what an AMD processor with AVX2 can; product.cpp is 1.1 to 1.3 times as fast
there (bench/README.md). torch.compile asks for a pass over each of its graphs, and this one
exchanges the products. Code that is not compiled calls torch.mm, which is the readable twin.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from andrea.runtime.native import COUNT, POINTER, compiled_library, processor

SOURCE = Path(__file__).with_suffix(".cpp")
SMALLEST = 1 << 22  # multiplications in a product: calling our function takes longer than calling torch's
MADE_BY = "AMD"  # in the name of processors for which MKL has no code of its own


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled function; None without a compiler."""
    functions = compiled_library(SOURCE)
    if functions is not None:
        functions.product.argtypes = [POINTER] * 4 + [COUNT] * 3
        functions.product.restype = None
    return functions


def is_faster_than_torch() -> bool:
    """Whether this is a processor of the kind where our product was seen to be faster, and it can be compiled."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and MADE_BY in processor() and library() is not None


@torch.library.custom_op("andrea::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a (n, k) times b (k, m) -> (n, m), all fp32 on a CPU, with any strides."""
    if a.shape[1] == 0:
        return a.new_zeros(a.shape[0], b.shape[1])
    c = a.new_empty(a.shape[0], b.shape[1])
    if c.numel():
        strides = (ctypes.c_int64 * 4)(*a.stride(), *b.stride())
        library().product(a.data_ptr(), b.data_ptr(), c.data_ptr(), strides, *c.shape, a.shape[1])
    return c


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


class OurProducts(CustomGraphPass):
    """Exchanges torch's matrix products in fp32 that are large enough, of a graph for the CPU."""

    def __call__(self, graph: fx.Graph) -> None:
        aten = torch.ops.aten
        for node in list(graph.nodes):
            if node.target is aten.mm.default:
                added, (a, b) = None, node.args
            elif node.target is aten.addmm.default and not node.kwargs:
                added, a, b = node.args
            else:
                continue
            left, right = a.meta["val"], b.meta["val"]
            is_large = left.shape[0] * left.shape[1] * right.shape[1] >= SMALLEST
            if left.device.type != "cpu" or left.dtype != torch.float32 or not is_large:
                continue
            with graph.inserting_before(node):
                exchanged = graph.call_function(torch.ops.andrea.product.default, (a, b))
                exchanged.meta["val"] = product(left, right)
                if added is not None:
                    exchanged = graph.call_function(aten.add.Tensor, (exchanged, added))
                    exchanged.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(exchanged)
            graph.erase_node(node)

    def uuid(self) -> bytes:
        """What torch's cache of compiled code is told of this pass."""
        return get_hash_for_files((__file__,))
