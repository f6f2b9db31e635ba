"""Our product in fp32 beside float64, for all kinds of strides, and the pass that exchanges torch's products in compiled code."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as compiler_settings
from torch._inductor.utils import run_and_get_code

from andrea.runtime import product as module
from andrea.runtime.compiling import compile_graph, configure_compiler
from andrea.runtime.native import FLAGS, NATIVE
from andrea.runtime.product import SOURCE, library, product

needs_library = pytest.mark.skipif(library() is None, reason="our C++ cannot be compiled here")
CPU = torch.device("cpu")


@pytest.fixture
def our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where our product is the faster one."""
    monkeypatch.setattr(module, "is_faster_than_torch", lambda: True)
    with compiler_settings.patch({"post_grad_custom_pre_pass": None}):
        configure_compiler(CPU)
        yield


@needs_library
@pytest.mark.parametrize(
    "n_row, depth, n_column", [(1, 1, 1), (5, 3, 17), (48, 768, 16), (49, 769, 33), (7, 2000, 800), (130, 70, 769)]
)
@pytest.mark.parametrize("turned_a", [False, True])
@pytest.mark.parametrize("turned_b", [False, True])
def test_the_product_is_that_of_float64(n_row: int, depth: int, n_column: int, turned_a: bool, turned_b: bool) -> None:
    a = torch.randn(depth, n_row).T if turned_a else torch.randn(n_row, depth)
    b = torch.randn(n_column, depth).T if turned_b else torch.randn(depth, n_column)
    exact = a.double() @ b.double()
    assert (product(a, b) - exact).abs().max() <= 1e-6 * depth**0.5 * exact.abs().max().clamp(min=1)


@needs_library
def test_parts_of_larger_matrices_and_empty_ones() -> None:
    a, b = torch.randn(40, 60)[3:30:2, 5:50:3], torch.randn(90, 40)[10:25, ::2]
    torch.testing.assert_close(product(a, b), a @ b)
    assert product(torch.ones(3, 0), torch.ones(0, 4)).equal(torch.zeros(3, 4))
    assert product(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)


@needs_library
def test_the_number_of_threads_changes_no_bit_and_no_number_spreads() -> None:
    a, b = torch.randn(301, 900), torch.randn(900, 50)
    a[7, 5], a[9, 6] = float("nan"), float("inf")
    threads, results = torch.get_num_threads(), []
    try:
        for n_thread in (1, 2, 3):
            torch.set_num_threads(n_thread)
            results.append(product(a, b))
    finally:
        torch.set_num_threads(threads)
    assert all(result.view(torch.int32).equal(results[0].view(torch.int32)) for result in results)
    assert results[0].isfinite().all(1).logical_not().nonzero().flatten().tolist() == [7, 9]
    assert results[0][7].isnan().all() and results[0][9].isinf().all()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(192, 256), nn.Linear(256, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square()).square().sum()


@needs_library
@pytest.mark.usefixtures("our_products")
def test_a_compiled_step_has_our_products_and_the_gradients_of_torch_s() -> None:
    model, x = Small(), torch.randn(2, 128, 192, requires_grad=True)
    inputs = [*model.parameters(), x]
    expected = torch.autograd.grad(model(x), inputs)
    compiled = compile_graph(model)
    results, code = run_and_get_code(lambda: torch.autograd.grad(compiled(x), inputs))
    assert sum(part.count("torch.ops.andrea.product.default(") for part in code) == 6, "two forward, four backward"
    assert not any("extern_kernels.mm(" in part or "extern_kernels.addmm(" in part for part in code)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@needs_library
@pytest.mark.usefixtures("our_products")
def test_small_products_and_those_in_bf16_are_torch_s() -> None:
    for x in (torch.randn(8, 192), torch.randn(256, 192).bfloat16()):
        weight = torch.randn(192, 256, dtype=x.dtype)
        _, code = run_and_get_code(compile_graph(torch.mm), x, weight)
        assert not any("andrea.product" in part for part in code)


def test_it_is_used_where_it_was_seen_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library", lambda: object())
    for capability, name, expected in (
        ("AVX2", "model name\t: AMD Ryzen 5", True),
        ("AVX2", "model name\t: Intel(R) Core(TM) i5", False),
        ("AVX512", "model name\t: AMD EPYC", False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda answer=capability: answer)
        monkeypatch.setattr(module, "processor", lambda answer=name: answer)
        assert module.is_faster_than_torch() is expected, (capability, name)
    monkeypatch.setattr(module, "processor", lambda: "AMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(module, "library", lambda: None)
    assert not module.is_faster_than_torch(), "without a compiler"


@pytest.mark.skipif(shutil.which("g++") is None or NATIVE != "-march=native", reason="g++ for x86-64 is needed")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "x86-64-v4"])
def test_it_compiles_for_vectors_of_each_width(processor: str, tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if flag != NATIVE]
    command = [
        "g++",
        *flags,
        f"-march={processor}",
        "-fopenmp",
        "-Wall",
        "-Werror",
        str(SOURCE),
        "-o",
        str(tmp_path / "product.so"),
    ]
    subprocess.run(command, check=True)
