"""Cards older than Ampere (V100, T4): torch's kernels serve, Triton's are refused. Tensors are fake: no card is needed."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from andrea.attention import ScaledDotProduct, ScoreModifiers, causal, multihead
from andrea.attention.attend import Case, choose, refusal
from andrea.attention.implementations import fastest
from andrea.training.loss import loss

CUDA = torch.device("cuda")


@pytest.fixture(params=[(7, 0), (7, 5), (8, 0), (9, 0)], ids=lambda found: f"sm_{found[0]}{found[1]}")
def is_old(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    answer = torch.compiler.disable(lambda device: request.param)  # as torch's function, which cannot be traced
    monkeypatch.setattr(torch.cuda, "get_device_capability", answer)
    monkeypatch.setattr(torch.version, "hip", None)
    with FakeTensorMode():
        yield request.param < (8, 0)


def case_of(**more: object) -> Case:
    query = torch.empty(1, 3, 13, 16, dtype=torch.float16, device=CUDA)
    return Case(query, query, query, ScaledDotProduct(), causal(), **more)


def test_each_choice_is_what_runs_there(is_old: bool) -> None:
    assert choose("auto", case_of())[0] == "sdpa"
    fused = "reference" if is_old else "triton"
    for more in ({"statistics": True}, {"modifiers": ScoreModifiers(softcap=5.0)}):
        assert choose("auto", case_of(**more))[0] == fused
    for name in ("triton", "flex"):
        assert bool(refusal(name, case_of())) == is_old
    tensor = case_of().query
    assert loss.uses_kernel(tensor) != is_old and multihead.one_pass_is_faster(tensor) != is_old


def test_only_kernels_of_torch_are_measured(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "median_milliseconds", lambda run: 1.0)
    others = {"flex", "triton"}
    assert others & fastest.measure(case_of(), 2).keys() == (set() if is_old else others)
    assert fastest.measure(case_of(), 2).keys() - others == {"sdpa_flash", "sdpa_efficient", "sdpa_cudnn"}


def test_what_is_asked_for_by_name_is_refused_in_one_line(is_old: bool) -> None:
    if is_old:
        with pytest.raises(ValueError, match="'triton' cannot be used here: Triton needs a GPU of .* 8.0, got 7.[05]$"):
            choose("triton", case_of())
    else:
        assert choose("triton", case_of())[0] == "triton"


def test_the_choice_is_made_while_torch_compile_traces(is_old: bool) -> None:
    """With statistics, as QK-clip has them in a compiled step."""
    factors: list[object] = []

    def note(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        factors.extend(node.args[1] for node in graph.graph.nodes if node.target is operator.mul)
        return graph

    def chosen(x: torch.Tensor) -> torch.Tensor:
        case = Case(x, x, x, ScaledDotProduct(), causal(), statistics=True)
        return x * {"reference": 2, "triton": 3}[choose("auto", case)[0]]

    torch.compile(chosen, backend=note, fullgraph=True, dynamic=False)(case_of().query)
    assert factors == [2 if is_old else 3]
