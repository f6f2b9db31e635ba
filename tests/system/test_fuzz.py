"""A few hundred hostile inputs at each border: taken, or refused in one line. `bench/fuzz.py` tries a hundred thousand."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from fuzzing import TARGETS
from fuzzing.trial import Outcome, Target, fuzz, try_one
from hypothesis import strategies as st

from andrea.config import UserError

INPUTS = {"configuration": 300, "token shards": 400, "checkpoints": 300, "resumes": 300, "records": 100, "tokenizer files": 400,
          "prompts": 150, "imports": 150, "commands": 8}  # fmt: skip
IN_PROCESS = [name for name in TARGETS if name != "commands"]


def attack(name: str, folder: Path) -> Outcome:
    return fuzz(TARGETS[name], folder, INPUTS[name], first_seed=1)


@pytest.mark.parametrize("name", IN_PROCESS + [pytest.param("commands", marks=pytest.mark.slow)])
def test_hostile_inputs_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    if name in IN_PROCESS:
        outcome = attack(name, tmp_path)
    else:  # it forks, which a process that has trained cannot do with autograd
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            outcome = fresh.submit(attack, name, tmp_path).result()
    assert outcome.inputs == INPUTS[name] and 0 < outcome.refused < outcome.inputs
    assert not outcome.findings


def test_what_is_neither_is_found(tmp_path: Path) -> None:
    def handle(number: int) -> None:
        if number % 3 == 0:
            raise UserError("refused")
        if number % 3 == 1:
            raise KeyError(number)

    outcome = fuzz(Target(st.integers(0, 100), lambda folder: handle), tmp_path, 60, first_seed=1)
    assert outcome.inputs == 60 and outcome.refused > 0
    assert any("KeyError" in place for place in outcome.findings)


def test_what_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzzing.trial.SECONDS", 0.05)

    def endless(tried: None) -> None:
        while True:
            pass

    busy, waiting = Outcome(), Outcome()
    try_one(endless, None, busy, waiting_s=30.0)
    monkeypatch.setattr("fuzzing.trial.SECONDS", 5.0)
    try_one(lambda tried: time.sleep(60), None, waiting, waiting_s=0.05)
    for outcome in (busy, waiting):
        assert any("TooSlow" in place for place in outcome.findings)
