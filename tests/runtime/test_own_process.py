"""A function in a process of its own: what it returns, raises and prints comes here; what it breaks does not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from andrea.config import UserError
from andrea.runtime.own_process import in_own_process


def called(function: Any, *given: Any, busy_s: float = 20.0) -> Any:
    return in_own_process("the file", function, *given, busy_s=busy_s, more_bytes=1 << 30)


def printed_sum(*numbers: int) -> int:
    print("adding", len(numbers))
    return sum(numbers)


def refuse() -> None:
    raise UserError("not this one")


def fail() -> None:
    assert 1 > 2, "a bug"


def spin() -> None:
    while True:
        pass


def fill() -> int:
    return len(bytearray(1 << 33))


def multiply() -> float:
    return float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())


def test_results_output_and_errors_come_back(capsys: pytest.CaptureFixture) -> None:
    assert called(printed_sum, 2, 3) == 5 and capsys.readouterr().out == "adding 2\n"
    with pytest.raises(UserError, match="^not this one$"):
        called(refuse)
    with pytest.raises(RuntimeError, match="AssertionError: a bug"):
        called(fail)
    with pytest.raises(FileNotFoundError) as raised:  # with what the last line of a command says of it
        called(os.listdir, "/nowhere")
    assert raised.value.filename == "/nowhere"


@pytest.mark.parametrize(
    ("function", "reason"), [(os.abort, "SIGABRT"), (spin, "busy for more than 1 s"), (fill, r"in 1\.1 GB of memory")]
)
def test_what_ends_the_process_is_one_line(function: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"^the file cannot be read.*{reason}"):
        called(function, busy_s=1.0)


def test_torch_computes_after_its_threads_were_started_here() -> None:
    assert multiply() == called(multiply) == 400.0**3
