"""bench/interop.py: its rows hold every pair of options, and its committed record every preset, all within their limits."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
from conftest import ROOT

for package in ("transformers", "lm_eval", "transformer_lens"):
    pytest.importorskip(package)

pytestmark = pytest.mark.untraced


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    import interop

    return interop


def test_the_rows_hold_every_pair(bench: ModuleType) -> None:
    factors = {"a": dict.fromkeys("123"), "b": dict.fromkeys("45"), "c": dict.fromkeys("6789")}
    rows = bench.pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(factors[one], factors[other]))
    assert 12 <= len(rows) < 24


def test_the_record_has_all_rows_and_none_is_beyond_its_limit(bench: ModuleType) -> None:
    rows = json.loads((ROOT / "bench" / "results" / "interop.json").read_text())["rows"]
    assert [(row["name"], row["options"]) for row in rows] == [(case.name, case.options) for case in bench.cases()]
    for row in rows:
        for program in bench.PROGRAMS:
            assert bench.is_good(row[program]), (row["name"], program)
        assert row["transformers"]["as"] and row["lm-eval"]["as"]


@pytest.mark.slow
@pytest.mark.long
def test_a_row_is_measured_once(tmp_path) -> None:
    record = tmp_path / "interop.json"
    command = [sys.executable, "bench/interop.py", "--only", "pairs 1", "--output", str(record)]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "| pairs 1 |" not in done.stdout and "| every pair of options, 1 models |" in done.stdout
    (row,) = json.loads(record.read_text())["rows"]
    assert row["transformers"]["as"] == "AndreaForCausalLM" and row["transformers"]["difference"] <= 1e-5
    assert row["llama.cpp"]["as"] is None and "lacks" in row["llama.cpp"]["why"]
    assert row["TransformerLens"]["difference"] <= 1e-5 and row["lm-eval"]["difference"] <= 1e-5
