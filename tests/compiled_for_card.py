"""What torch.compile makes of a function on an H200, on a machine without a GPU: bytes that it moves, kernels that it launches.

The function is traced on the CPU with the choices of a card. Each graph is then moved to a fake card, lowered and fused by
Inductor for sm_90, and thrown away before its code is loaded. Products and our operators count as they are read and written.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as autograd_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config, ir, scheduler
from torch._inductor.compile_fx import _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from andrea.attention import multihead

CARD = torch.device("cuda", 0)
H200 = types.SimpleNamespace(
    name="H200", type="cuda", index=0, major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=140 << 30,
    L2_cache_size=50 << 20, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, gcnArchName="",
)  # fmt: skip
LAUNCHES: dict[str, int] = {}  # of our operators, where they are more than one


@dataclass
class Graph:
    """A forward or backward graph as it is compiled: bytes read and written, and what is launched, by kind or name."""

    n_bytes: int
    launches: list[str] = field(default_factory=list)


@contextlib.contextmanager
def card() -> Iterator[None]:
    """Inductor finds an H200."""
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_properties", lambda *given: H200),
            (torch.cuda, "get_device_capability", lambda *given: (9, 0)),
            (torch.version, "cuda", "13.0"),
            (scheduler, "has_triton", lambda: True),
            # torch's copies a tensor to see that shapes fit, which needs CUDA
            (reinplace, "_inplace_generalized_scatter", lambda x, *given: x),
            (CudaInterface, "get_device_properties", staticmethod(lambda device=None: H200)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: H200)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def choices_of_a_card() -> Iterator[None]:
    """The model takes the operators that it has for a GPU."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(multihead.operators_of_a_card())
        attend = sys.modules["andrea.attention.attend"]  # the package has a function of this name
        serving = attend.Implementation(lambda case: None, attend.triton.run)
        patches.enter_context(mock.patch.dict(attend.IMPLEMENTATIONS, triton=serving))
        yield


def moved(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """Fake inputs on the card; the graph's own devices become the card."""
    mode = detect_fake_mode(inputs)
    for name, each in [*graph.named_buffers(), *graph.named_parameters()]:
        raise AssertionError(f"the graph holds {name}, {tuple(each.shape)}")
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            with mode:
                value = getattr(graph, node.target)
                setattr(
                    graph, node.target, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CARD)
                )
        node.kwargs = {name: CARD if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
        node.args = tuple(CARD if isinstance(value, torch.device) else value for value in node.args)
    with mode:
        inputs = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=CARD)
            if isinstance(each, Tensor)
            else each
            for each in inputs
        ]
    with torch.no_grad():
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    return inputs


def lowered(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
    with card(), config.patch(compile_threads=1, fx_graph_cache=False), torch.no_grad():
        inputs = moved(graph, inputs)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            _recursive_post_grad_passes(graph, is_inference=not torch.is_grad_enabled())
            lowering = GraphLowering(graph, example_inputs=inputs, shape_env=None)
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
                lowering.run(*inputs)
                lowering._update_scheduler()
                return counted(lowering)


def counted(lowering: GraphLowering) -> Graph:
    launches = []
    for node in lowering.scheduler.nodes:
        kind = node.node
        if node.is_extern():
            if isinstance(kind, (ir.MultiOutput, ir.NopKernel)):
                continue
            name = getattr(kind, "python_kernel_name", None) or type(kind).__name__
            launches += [name] * LAUNCHES.get(name, 1)
        elif not isinstance(node, scheduler.NopKernelSchedulerNode):
            launches.append("triton " + "_".join(sorted(each.get_name() for each in node.get_nodes())))
    return Graph(lowering.count_bytes()[0], launches)


def graphs_of(function: Callable, *inputs, module: nn.Module | None = None) -> list[Graph]:
    """The graphs that `function(*inputs)` compiles to: forward and, if its result has gradients, backward."""
    found: list[Graph] = []

    def inner(graph: torch.fx.GraphModule, given: list[Tensor]):
        found.append(lowered(graph, given))
        return not_loaded

    backend = aot_autograd(
        fw_compiler=inner, bw_compiler=inner, inference_compiler=inner,
        decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )  # fmt: skip
    torch.compiler.reset()
    at_once = autograd_config.patch(force_non_lazy_backward_lowering=True)
    with choices_of_a_card(), at_once, contextlib.suppress(NotLoaded):
        torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    torch.compiler.reset()
    return found


class NotLoaded(Exception):
    pass


def not_loaded(*arguments: object) -> None:
    raise NotLoaded
