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
    # targets; forward with and without statistics, two of the backward pass; the loss with a soft cap and without
    assert len(rows) == len(targets) * (4 + 2)
    for row in rows:
        assert row["spilled_bytes"] == 0 and row["registers"] > 16 and row["occupancy"] >= 1, row
        assert row["shared_bytes"] <= 1024 * targets[row["target"].removeprefix("sm_")], row
        if row["kernel"].startswith("loss"):
            assert row["loads_of_2_bytes"] == 1, row  # the target's logit; all others are read 16 bytes at a time
            continue
        products = [loop["instructions"] for loop in row["loops"] if loop["products"]]
        assert len(products) == 2 and all(loop["special"] for loop in row["loops"] if loop["products"]), row
    if width == 64:  # on Hopper, programs share a multiprocessor
        assert all(row["occupancy"] >= 2 for row in rows if row["target"] == "sm_90")


@pytest.mark.slow
def test_hoppers_backward_kernels_compute_the_softmax_beside_a_product(tmp_path):
    """In the loop over blocks that are seen whole, exponentials lie between a product's start and the wait for it."""
    rows = [
        row
        for row in compiled(tmp_path, "--widths", "128", "--types", "bf16", "--targets", "90")
        if row["kernel"] in ("keys", "queries")  # the forward kernel has one product before its softmax
    ]
    assert len(rows) == 2
    for row in rows:
        unmasked = min((loop for loop in row["loops"] if loop["products"]), key=lambda loop: loop["instructions"])
        assert unmasked["beside_products"] > 0, row


@pytest.mark.slow
@pytest.mark.long
def test_modified_scores_and_sinks_compile(tmp_path):
    rows = compiled(tmp_path, "--modified", "--widths", "64", "--types", "bf16", "fp32", "--targets", "80", "90")
    assert sum("modified" in row["kernel"] for row in rows) == 2 * 2 * 4
    assert all(row["occupancy"] >= 1 for row in rows), rows


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("words", [["--modified"], ["--modes", "interval"]])
def test_hoppers_wide_heads_spill_nothing_with_modified_scores_or_intervals(words, tmp_path):
    rows = compiled(tmp_path, *words, "--widths", "128", "--types", "bf16", "--targets", "90")
    assert len(rows) == 4 + 2 and all(row["spilled_bytes"] == 0 for row in rows), rows


@pytest.mark.slow
@pytest.mark.long
def test_the_other_modes_a_padded_width_and_fp32_compile(tmp_path):
    rows = compiled(
        tmp_path, "--widths", "24", "--types", "bf16", "fp32", "--targets", "90", "--modes", "none", "interval"
    )
    assert all(row["occupancy"] >= 1 for row in rows), rows


@pytest.mark.slow
def test_the_kernels_of_a_decoded_token_spill_nothing(tmp_path):
    rows = compiled(tmp_path, "--decoding", "--widths", "64", "128", "--types", "bf16", "--targets", "80", "90", "100")
    assert len(rows) == 2 * 2 * 3 and all(row["spilled_bytes"] == 0 and row["occupancy"] >= 2 for row in rows), rows


@pytest.mark.slow
def test_the_kernels_compile_for_amd(tmp_path):
    rows = compiled(tmp_path, "--widths", "64", "--types", "bf16", "--targets", "gfx942")
    assert len(rows) == 4 and all(row["products_in_code"] > 0 for row in rows), rows
    assert all(row["spilled_bytes"] <= 128 and row["shared_bytes"] <= 64 * 1024 for row in rows), rows


RESULTS = ROOT / "bench" / "results"
TABLE = ("forward + statistics", "keys", "queries")  # its columns


def test_the_table_of_kernels_shows_the_record():
    rows = json.loads((RESULTS / "kernel-resources.json").read_text())["rows"]
    found = {(row["target"], row["width"], row["kernel"]): row for row in rows if "width" in row}
    text = (ROOT / "bench" / "README.md").read_text()
    shown = {
        (target, int(width), kernel): field
        for target, width, *fields in re.findall(r"^\| (sm_\d+|gfx942), (\d+) \|" + 3 * r" (.*?) \|" + "$", text, re.M)
        for kernel, field in zip(TABLE, fields, strict=True)
    }
    assert shown == {key: shown_as(row) for key, row in found.items() if row["kernel"] in TABLE}


def shown_as(row: dict) -> str:
    fields = [row["registers"], row["spilled_bytes"], row["shared_bytes"] // 1024]
    if row["target"].startswith("sm_"):
        loop = min((loop for loop in row["loops"] if loop["products"]), key=lambda loop: loop["instructions"])
        beside = f" ({loop['beside_products']})" if loop["beside_products"] else ""
        fields += [row["occupancy"], f"{loop['instructions']}/{loop['special']}{beside}"]
    return " · ".join(map(str, fields))
