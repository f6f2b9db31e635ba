"""Differences between runs, and the warnings about them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from run_folders import CONFIG, make_run

from andrea.insight.compare.comparison import comparability_warnings, differences
from andrea.insight.compare.runs import read_run


def test_different_data_tokenizers_and_evaluations_give_warnings(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one"), "one")
    two = read_run(make_run(tmp_path / "two", data="bb", train__eval_tokens=4096), "two")
    assert comparability_warnings([one, one]) == []
    data, evaluated = comparability_warnings([one, two])
    assert "data differ" in data and "aaaaaaaaaaaa: one" in data and "bbbbbbbbbbbb: two" in data
    assert "null: one; 4096: two" in evaluated
    other = read_run(make_run(tmp_path / "three"), "three")
    other = dataclasses.replace(other, tokenizer="bpe-300-ffff")
    (tokenizers,) = comparability_warnings([one, other])
    assert "tokenizers differ" in tokenizers and "compare bits per byte" in tokenizers


def test_only_keys_that_differ_are_listed_without_names_and_paths(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one"), "one")
    two = read_run(make_run(tmp_path / "two", optimizer__learning_rate=0.5, logger__group="x"), "two")
    two.config["name"], two.config["newer"] = "other", {"key": 1}
    learned = CONFIG["optimizer"]["learning_rate"]
    assert differences([one, two]) == {"optimizer.learning_rate": [learned, 0.5], "newer.key": ["—", 1]}
    assert differences([one, one]) == {}
