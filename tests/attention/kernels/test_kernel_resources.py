"""The kernels compiled for real cards, here: what is tuned spills nothing, and everything compiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.untraced

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


def compiled(tmp_path: Path, *words: str) -> list[dict]:
    """Rows of bench/kernel_resources.py; its own process, because interpreted kernels cannot be compiled."""
    out = tmp_path / "resources.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "bench" / "kernel_resources.py"), *words, "--json", str(out)]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("width", "dtype"), [(64, "fp16"), (128, "bf16")])  # tiles are the same for both types
def test_tuned_kernels_spill_nothing(width, dtype, tmp_path):
    targets = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}  # KiB of shared memory for a program
    rows = compiled(tmp_path, "--widths", str(width), "--types", dtype, "--targets", *targets)
    # targets; forward with and without statistics, three of the backward pass; the loss with a soft cap and without
    assert len(rows) == len(targets) * (5 + 2)
    for row in rows:
        assert row["spilled_bytes"] == 0 and row["registers"] > 16 and row["occupancy"] >= 1, row
        assert row["shared_bytes"] <= 1024 * targets[row["target"].removeprefix("sm_")], row
        if row["kernel"].startswith("loss"):
            assert row["loads_of_2_bytes"] == 1, row  # the target's logit; all others are read 16 bytes at a time
            continue
        products = [loop["instructions"] for loop in row["loops"] if loop["products"]]
        assert len(products) == 2 and all(loop["special"] for loop in row["loops"] if loop["products"]), row
        assert 0 < row["predicted_share"] < 1, row
    if width == 64:  # on Hopper, programs share a multiprocessor
        assert all(row["occupancy"] >= 2 for row in rows if row["target"] == "sm_90")


@pytest.mark.slow
def test_atomic_gradients_of_queries_are_not_masked_where_all_keys_exist(tmp_path):
    """The loop over queries that see every key has fewer instructions than the masked one: no comparison, no selection."""
    rows = compiled(tmp_path, "--widths", "64", "--types", "bf16", "--targets", "90")
    (row,) = (row for row in rows if "atomic" in row["kernel"])
    masked, unmasked = (loop["instructions"] for loop in row["loops"] if loop["products"])
    assert unmasked < 0.85 * masked, row


@pytest.mark.slow
def test_hoppers_kernels_compute_the_softmax_beside_a_product(tmp_path):
    """In the loop over blocks that are seen whole, exponentials lie between a product's start and the wait for it."""
    rows = [
        row
        for row in compiled(tmp_path, "--widths", "128", "--types", "bf16", "--targets", "90")
        if not row["kernel"].startswith("loss")
    ]
    assert len(rows) == 5
    for row in rows:
        unmasked = min((loop for loop in row["loops"] if loop["products"]), key=lambda loop: loop["instructions"])
        assert unmasked["beside_products"] > 0, row


@pytest.mark.slow
@pytest.mark.long
def test_modified_scores_and_sinks_compile(tmp_path):
    rows = compiled(tmp_path, "--modified", "--widths", "64", "--types", "bf16", "fp32", "--targets", "80", "90")
    assert sum("modified" in row["kernel"] for row in rows) == 2 * 2 * 5
    assert all(row["occupancy"] >= 1 for row in rows), rows


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("words", [["--modified"], ["--modes", "interval"]])
def test_hoppers_wide_heads_spill_nothing_with_modified_scores_or_intervals(words, tmp_path):
    """Their forward kernel begins scores ahead, which takes many registers. Atomic dQ is used where it was measured only."""
    rows = compiled(tmp_path, *words, "--widths", "128", "--types", "bf16", "--targets", "90")
    predicted = [row for row in rows if "atomic" not in row["kernel"]]
    assert len(predicted) == 4 + 2 and all(row["spilled_bytes"] == 0 for row in predicted), predicted


@pytest.mark.slow
@pytest.mark.long
def test_the_other_modes_a_padded_width_and_fp32_compile(tmp_path):
    rows = compiled(
        tmp_path, "--widths", "24", "--types", "bf16", "fp32", "--targets", "90", "--modes", "none", "interval"
    )
    assert all(row["occupancy"] >= 1 for row in rows), rows


@pytest.mark.slow
def test_the_kernels_compile_for_amd(tmp_path):
    rows = compiled(tmp_path, "--widths", "64", "--types", "bf16", "--targets", "gfx942")
    assert len(rows) == 5 and all(row["products_in_code"] > 0 for row in rows), rows
    two_passes = [row for row in rows if "atomic" not in row["kernel"]]  # the atomic way spills more, and is not chosen
    assert all(row["spilled_bytes"] <= 128 and row["shared_bytes"] <= 64 * 1024 for row in two_passes), rows


RESULTS = ROOT / "bench" / "results"
TABLE = ("forward + statistics", "keys", "keys, atomic dQ", "queries")  # its columns


def test_the_table_of_kernels_shows_the_record():
    rows = json.loads((RESULTS / "kernel-resources.json").read_text())["rows"]
    found = {(row["target"], row["width"], row["kernel"]): row for row in rows if "width" in row}
    text = (ROOT / "bench" / "README.md").read_text().partition("The same at commit 8ce6ca1")[0]
    shown = {
        (target, int(width), kernel): field
        for target, width, *fields in re.findall(r"^\| (sm_\d+|gfx942), (\d+) \|" + 4 * r" (.*?) \|" + "$", text, re.M)
        for kernel, field in zip(TABLE, fields, strict=True)
    }
    assert shown == {key: shown_as(row) for key, row in found.items() if row["kernel"] in TABLE}


def shown_as(row: dict) -> str:
    fields = [row["registers"], row["spilled_bytes"], row["shared_bytes"] // 1024]
    if row["target"].startswith("sm_"):
        loop = min((loop for loop in row["loops"] if loop["products"]), key=lambda loop: loop["instructions"])
        beside = f" ({loop['beside_products']})" if loop["beside_products"] else ""
        fields += [row["occupancy"], f"{loop['instructions']}/{loop['special']}{beside}", row["predicted_tflops"]]
    return " · ".join(map(str, fields))


def test_the_predictions_are_those_of_the_record(tmp_path):
    computed = compiled(tmp_path, "--predict", str(RESULTS / "kernel-resources.json"))
    assert computed == json.loads((RESULTS / "kernel-predictions.json").read_text())["rows"]


def test_predicted_times_follow_from_the_record():
    """By hand: one product of the causal half is 65,536 · 768 · T operations, and delta moves two tensors."""
    rows = json.loads((RESULTS / "kernel-predictions.json").read_text())["rows"]
    found = {(row["card"], row["width"], row["length"], row["kernel"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 2 * 4 * 9
    for (card, width, length, _), row in found.items():
        of_case = lambda kernel, case=(card, width, length): found[*case, kernel]["ms"]  # noqa: E731
        two_passes = of_case("dK, dV") + of_case("dQ") + of_case("delta")
        assert of_case("backward, two passes") == pytest.approx(two_passes, abs=0.002)
        if row["kernel"] == "forward + statistics":
            assert row["tflops"] == pytest.approx(2 * 65536 * 768 * length / row["ms"] / 1e9, rel=0.01)
    assert found["H100", 64, 1024, "delta"]["ms"] == pytest.approx(2 * 2 * 65536 * 768 / 3.35e12 * 1000, abs=0.001)
    assert found["H200", 64, 1024, "delta"]["ms"] < found["H100", 64, 1024, "delta"]["ms"]
