"""The speed of an earlier run: which run is taken, and which figure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from andrea.training.planning.pace.measured_pace import Mode, measured_pace

MODE = Mode("cpu", "fp32", "off")
CONFIG = {"device": "cpu", "precision": "fp32", "compile": "off"}


def write_run(runs: Path, name: str, per_token: float, paces: tuple = (70, 110, 90), step: int = 3, **state) -> Path:
    """A run with one checkpoint and records of its speeds, in tokens per second."""
    folder = runs / name
    checkpoint = folder / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True)
    saved = {"config": CONFIG, "tokens": 100, "flops": 100 * per_token, **state}
    (checkpoint / "state.json").write_text(json.dumps(saved))
    lines = [{"step": 1}, *({"step": 2, "train/tokens_per_second": pace} for pace in paces)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_it_is_the_median_speed_in_flops(tmp_path: Path) -> None:
    write_run(tmp_path, "a", per_token=1000)
    pace = measured_pace(tmp_path, MODE, 500)
    assert (pace.flops_per_second, pace.run) == (90 * 1000, "a")


def test_the_run_of_the_nearest_size_is_taken_above_or_below(tmp_path: Path) -> None:
    for name, per_token in (("small", 10), ("middle", 1000), ("large", 100_000)):
        write_run(tmp_path, name, per_token)
    for wanted, name in ((1, "small"), (90, "small"), (110, "middle"), (9000, "middle"), (11_000, "large")):
        assert measured_pace(tmp_path, MODE, wanted).run == name


def test_of_equally_near_runs_the_newest_is_taken(tmp_path: Path) -> None:
    for age_s, name in ((30, "a"), (10, "b"), (20, "c")):
        os.utime(write_run(tmp_path, name, 1000), (1e9 - age_s, 1e9 - age_s))
    assert measured_pace(tmp_path, MODE, 500).run == "b"


def test_a_run_counts_as_its_last_checkpoint_says(tmp_path: Path) -> None:
    write_run(tmp_path, "a", per_token=10, step=3, ranks=2)
    last = tmp_path / "a" / "checkpoints" / "step-00000005"
    last.mkdir()
    (last / "state.json").write_text(json.dumps({"config": CONFIG, "tokens": 10, "flops": 70, "ranks": 1}))
    assert measured_pace(tmp_path, MODE, 500).flops_per_second == 90 * 7


@pytest.mark.parametrize(
    "unlike",
    [
        {"ranks": 2},
        {"config": {**CONFIG, "precision": "bf16"}},
        {"config": {**CONFIG, "compile": "on"}},
        {"config": {}},
        {"config": None},
        {"tokens": 0},
        {"flops": 0},
        {"flops": "many"},
        {"paces": ()},
    ],
)
def test_runs_of_another_mode_and_damaged_ones_do_not_count(unlike: dict, tmp_path: Path) -> None:
    write_run(tmp_path, "unlike", per_token=500, **unlike)
    (tmp_path / "without-checkpoints").mkdir()
    assert measured_pace(tmp_path, MODE, 500) is None
    write_run(tmp_path, "far", per_token=9, ranks=1)
    assert measured_pace(tmp_path, MODE, 500).run == "far"
