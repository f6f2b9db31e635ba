"""Where a run stands against the curves that ship with the presets: which run has a curve, and what it says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from andrea.api.command_line import configure
from andrea.config import RunConfig, digest, recipe_fingerprint
from andrea.training.expected import curves
from andrea.training.expected.curves import Curve, Expected, ExpectedCurves, Standing
from andrea.training.records import Progress
from andrea.training.records.run_folder import read_lines

SHIPPED = sorted(curves.FOLDER.glob("*.json"))


def config_of(*words: str) -> RunConfig:
    return configure(RunConfig, "train", list(words))


# --------------------------------------------------------------------------------------------------------- a curve


def test_the_expected_figure_is_the_mean_and_between_evaluations_straight_in_the_logarithm_of_tokens() -> None:
    curve = Curve(16, (2, 8, 16), ((3.0, 2.0, 1.0), (5.0, 2.4, 1.2)))
    figures = {share: curve.expected(share) for share in (1 / 8, 1 / 4, 1 / 2, 1)}
    assert [expected.bpb for expected in figures.values()] == pytest.approx([4.0, 3.1, 2.2, 1.1])
    assert curve.expected(1 / 16) is None
    # Variances 2, 0.08 and 0.02: the mean of an evaluation and its neighbours, times (1 + 1/N), then twice the root.
    assert figures[1].spread == pytest.approx(2 * math.sqrt((0.08 + 0.02) / 2 * 1.5))
    assert figures[1 / 2].spread == pytest.approx(2 * math.sqrt((2 + 0.08 + 0.02) / 3 * 1.5))


def test_a_figure_within_the_spread_is_as_expected() -> None:
    expected = Expected(1.2, 0.05)
    assert Standing(1.249, expected).words == Standing(1.151, expected).words == "as expected at this point"
    assert Standing(1.263, expected).words == "0.063 worse than expected at this point"
    assert Standing(1.1, expected).words == "0.100 better than expected at this point"


# ---------------------------------------------------------------------------------------------- which runs have one


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder with a curve of the default run."""
    config = config_of()
    content = {"recipe": recipe_fingerprint(config), "text": "pystdlib", "steps": config.steps, "at": [350, 700]}
    figures = {"1": [1.3, 1.14], "2": [1.3, 1.14]}
    (tmp_path / "nano.json").write_text(json.dumps(content | {"bits_per_byte": figures}))
    (tmp_path / "one-seed.json").write_text(json.dumps(content | {"steps": 70, "bits_per_byte": {"1": [2, 1]}}))
    return tmp_path


@pytest.mark.parametrize("words", [[], ["seed=3", "precision=fp32", "train.micro_batch=1", "model.name=mine"]])
def test_a_run_of_the_recipe_on_the_text_has_a_curve(words: list[str], measured: Path) -> None:
    found = ExpectedCurves.of(config_of(*words), measured)
    assert list(found.by_length) == [700] and found.at(700, 700).bpb == pytest.approx(1.14)
    line = "1.140 ± 0.000 bits per byte at the end, from 2 runs of this recipe (nano) on Python's standard library"
    assert found.words_at_end(700, "nano") == line and found.words_at_end(800, "nano") == ""


@pytest.mark.parametrize(
    "word",
    ["optimizer.weight_decay=0.2", "model.d_mlp=513", "attention.window=64", "train.tokens_per_step=8192",
     "tokenizer.vocab_size=4000", "data.path=.", "data=shakespeare"],
)  # fmt: skip
def test_another_recipe_or_text_has_none(word: str, measured: Path) -> None:
    assert ExpectedCurves.of(config_of(word), measured).by_length == {}


def test_a_run_that_did_not_follow_the_recipe_is_not_compared(measured: Path) -> None:
    found = ExpectedCurves.of(config_of(), measured)
    progress = Progress(step=350, planned_steps=700)
    assert found.standing(1.4, progress).expected.bpb == pytest.approx(1.3)
    progress.follows_recipe = False
    assert found.standing(1.4, progress) is None
    assert found.standing(math.nan, Progress(step=350, planned_steps=700)) is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_curve_is_of_a_preset_as_it_stands(path: Path) -> None:
    """If this fails after a change of a preset: measure again with bench/expected.py, or remove the file."""
    content = json.loads(path.read_text())
    assert digest(content["values"]) == content["recipe"] == recipe_fingerprint(config_of(f"model={content['preset']}"))
    assert content["text"] in curves.TEXTS and content["at"] == sorted(set(content["at"]))
    assert content["at"][-1] == content["steps"]
    assert {len(figures) for figures in content["bits_per_byte"].values()} == {len(content["at"])}


# ------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture
def curve_of_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run has a curve for 12 steps, far below what the tiny model reaches."""
    curve = Curve(12, (4, 8, 12), ((5.0, 4.0, 1.0), (5.4, 4.2, 1.0)))
    monkeypatch.setattr(ExpectedCurves, "of", classmethod(lambda cls, config: cls({12: curve}, "notes")))


def evaluations(tmp_path: Path, name: str) -> dict[int, dict]:
    records = read_lines(tmp_path / "runs" / name / "metrics.jsonl")
    return {record["step"]: record for record in records if "val/bpb" in record and "event" not in record}


def test_a_run_says_and_records_where_it_stands(curve_of_12, tmp_path: Path, tiny_run, capsys) -> None:
    assert tiny_run("name=a", "dry_run=true") == 0
    line = "expected               1.000 ± 0.245 bits per byte at the end, from 2 runs of this recipe (andrea-nano) on notes"
    said = capsys.readouterr().out
    assert " ".join(line.split()) in " ".join(said.split())
    assert tiny_run("name=a", "train.eval_every=4") == 0
    said, seen = capsys.readouterr().out, evaluations(tmp_path, "a")
    assert [record["expected/bpb"] for record in seen.values()] == pytest.approx([5.2, 4.1, 1.0])
    worse = seen[12]["val/bpb"] - 1.0
    assert f"{seen[12]['val/bpb']:.4f} bits/byte · {worse:.3f} worse than expected at this point\n" in said
    assert re.search(r"^health: step \d+: worse_than_expected: validation ", said, re.MULTILINE)
    assert '"expected":5.2' in (tmp_path / "runs" / "a" / "run.html").read_text()


@pytest.mark.parametrize(
    ("words", "compared"),
    [
        (["train.eval_tokens=64"], {12}),
        (["train.max_minutes=50", "train.steps=12"], {12}),
        (["train.steps=9"], set()),
    ],
)
def test_only_what_was_measured_is_compared(words, compared: set[int], curve_of_12, tmp_path: Path, tiny_run) -> None:
    assert tiny_run("name=a", *words, "train.sample_tokens=0") == 0
    seen = evaluations(tmp_path, "a")
    assert {step for step, record in seen.items() if "expected/bpb" in record} == compared and len(seen) == 3


@pytest.mark.parametrize(
    ("first", "then", "compared"),
    [
        (["train.steps=10"], [], True),  # 4 steps, and the decay begins after the fourth
        (["train.steps=8"], [], False),  # it had begun
        (["train.steps=12"], ["optimizer.weight_decay=0.2"], False),
    ],
)
def test_a_resumed_run_is_compared_if_it_has_followed_one_recipe(
    first, then, compared: bool, curve_of_12, tmp_path: Path, tiny_run, script
) -> None:
    quiet = ["train.sample_tokens=0", "optimizer.warmup_steps=2"]
    assert tiny_run("name=a", *first, *quiet) == 0
    run = tmp_path / "runs" / "a"
    again = [f"runs_dir={run.parent}", f"data_dir={tmp_path / 'data'}", "name=a", "train.steps=12", *then]
    assert script("train")([f"resume={run / 'checkpoints' / 'step-00000004'}", *again]) == 0
    (found,) = [each for folder in run.parent.iterdir() for each in [evaluations(tmp_path, folder.name)] if 12 in each]
    assert ("expected/bpb" in found[12]) == compared
