"""The measurement of implementations on a card, here with a stopwatch that counts calls."""

from __future__ import annotations

import torch

from andrea.attention import Additive, Case, causal
from andrea.attention.implementations import fastest


def test_it_times_forward_and_backward_of_those_that_serve_the_case_fastest_first(monkeypatch):
    """Random numbers in the case's shape, for more sequences than the case has; the function is the plain dot product."""
    times = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(fastest, "CANDIDATES", ("reference", "sdpa", "sdpa_flash", "triton"))
    monkeypatch.setattr(fastest, "median_milliseconds", lambda run: (run(), next(times))[1])
    query, key = torch.zeros(1, 4, 7, 16), torch.zeros(1, 2, 7, 16)
    case = Case(query, key, key, Additive(16, 16, 5, 4), causal(), statistics=True)
    assert list(fastest.measure(case, 3).items()) == [("sdpa", 1.0), ("triton", 2.0), ("reference", 3.0)]


def test_an_implementation_without_a_kernel_for_the_case_is_left_out(monkeypatch):
    def missing(run):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(fastest, "CANDIDATES", ("sdpa",))
    monkeypatch.setattr(fastest, "median_milliseconds", missing)
    tensor = torch.zeros(1, 2, 7, 16)
    assert fastest.measure(Case(tensor, tensor, tensor, Additive(16, 16, 5, 2)), 1) == {}
