"""The measurement of implementations on a card, here with a stopwatch that counts calls."""

from __future__ import annotations

import pytest
import torch

from andrea.attention import Additive, Case, DotProduct, causal
from andrea.attention.implementations import fastest


def test_it_times_forward_and_backward_of_those_that_serve_the_case_fastest_first(monkeypatch):
    """Random numbers in the case's shape, for more sequences than the case has; the function is the plain dot product."""
    times = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(fastest, "CANDIDATES", ("reference", "sdpa", "sdpa_flash", "triton"))
    monkeypatch.setattr(fastest, "median_milliseconds", lambda run: (run(), next(times))[1])
    query, key = torch.zeros(1, 4, 7, 16), torch.zeros(1, 2, 7, 16)
    case = Case(query, key, key, Additive(16, 16, 5, 4), causal(), statistics=True)
    assert list(fastest.measure(case, 3).items()) == [("sdpa", 1.0), ("triton", 2.0), ("reference", 3.0)]


def test_the_tensors_lie_in_memory_as_those_of_a_layer(monkeypatch):
    """(B, T, H, D), and so does the gradient: a kernel may be slower there than where a head's rows are next to each other."""
    strides, own = [], fastest.attend

    def recorded(query, key, value, **how):
        strides.extend(each.stride() for each in (query, key, value))
        output = own(query, key, value, **how)
        output.register_hook(lambda gradient: strides.append(gradient.stride()))
        return output

    monkeypatch.setattr(fastest, "CANDIDATES", ("sdpa",))
    monkeypatch.setattr(fastest, "attend", recorded)
    monkeypatch.setattr(fastest, "median_milliseconds", lambda run: (run(), 1.0)[1])
    query, key = torch.zeros(1, 4, 7, 16), torch.zeros(1, 2, 7, 16)
    fastest.measure(Case(query, key, key, DotProduct(), causal()), 3)
    of_heads = {n_head: (7 * n_head * 16, 16, n_head * 16, 1) for n_head in (4, 2)}
    assert strides == [of_heads[4], of_heads[2], of_heads[2], of_heads[4]]


def test_an_implementation_without_a_kernel_for_the_case_is_left_out(monkeypatch):
    def missing(run):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(fastest, "CANDIDATES", ("sdpa",))
    monkeypatch.setattr(fastest, "median_milliseconds", missing)
    tensor = torch.zeros(1, 2, 7, 16)
    assert fastest.measure(Case(tensor, tensor, tensor, Additive(16, 16, 5, 2)), 1) == {}


def test_calls_are_queued_between_two_events_and_a_single_call_is_never_timed(monkeypatch):
    """Ten calls of 3 ms each lie between the events of a pair, and the host waits for the last event only."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.calls_before = log.count("call")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 3.0 * (end.calls_before - self.calls_before)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert fastest.median_milliseconds(lambda: log.append("call")) == 3.0
    waits = [index for index, what in enumerate(log) if what == "wait"]
    between = [after - before - 1 for before, after in zip(waits, waits[1:], strict=False)]
    assert between == [fastest.QUEUED] * (fastest.ROUNDS - 1) and fastest.QUEUED >= 10


@pytest.mark.slow
@pytest.mark.untraced
def test_compiled_the_kernels_statistics_are_reduced_by_compiled_code_to_the_same_numbers(monkeypatch):
    """As a compiled training step does it, so that `auto` compares what training runs."""
    pytest.importorskip("triton")
    ran_compiled: list[bool] = []
    own = fastest.head_statistics

    def recorded(*given):
        ran_compiled.append(torch.compiler.is_compiling())
        return own(*given)

    query, key = torch.randn(2, 4, 13, 16), torch.randn(2, 2, 13, 16)
    how = {"compatibility": DotProduct(), "mask": causal(), "statistics": True, "implementation": "triton"}
    _, eager = fastest.attend_and_reduce(query, key, key, **how)
    _, compiled = torch.compile(fastest.attend_and_reduce, dynamic=False)(query, key, key, **how)
    for name, theirs, mine in zip(eager._fields, eager, compiled, strict=True):
        assert theirs is mine is None or torch.allclose(theirs, mine, rtol=1e-5, atol=1e-5), name

    monkeypatch.setattr(fastest, "head_statistics", recorded)
    monkeypatch.setattr(fastest, "CANDIDATES", ("triton",))
    monkeypatch.setattr(fastest, "median_milliseconds", lambda run: (run(), 1.0)[1])
    case = Case(query.requires_grad_(), key.requires_grad_(), key, DotProduct(), causal())
    for wanted in (False, True):
        torch.compiler.reset()
        ran_compiled.clear()
        assert fastest.measure(case, 2, compiled=wanted) == {"triton": 1.0}
        assert any(ran_compiled) == wanted
