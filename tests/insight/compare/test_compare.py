"""The command that compares runs: what it prints, writes and refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folders import make_eight_runs, make_run

from andrea.api.command_line import configure
from andrea.checkpoint import Checkpoint
from andrea.cli.commands import to_key_value
from andrea.config import CompareConfig, RunConfig, UserError
from andrea.evaluation.results import Figure, append_figures
from andrea.insight.compare.page import compare
from andrea.insight.compare.runs import find_run_folders, read_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_eight_runs(tmp_path / "runs")


def output_of(*words: str) -> str:
    lines: list[str] = []
    config = configure(CompareConfig, "compare", to_key_value(list(words), positional="runs"))
    predicted = configure(RunConfig, "train", [f"model={config.predict}"]).model if config.predict else None
    assert compare(config, predicted, lines.append) == 0
    return "\n".join(lines)


def test_the_command_writes_the_page_and_prints_the_fit(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "page.html"
    text = output_of(str(runs), f"out={out}", "predict=andrea-nano", "predict_tokens=20M".replace("M", "000000"))
    assert "the full law L(N, D), fitted to 8 runs" in text and "predicted for andrea-nano" in text
    assert "on 20.0M tokens" in text and "take this as a rough estimate" in text  # thousands of times the runs' size
    assert "caution" not in text
    page = out.read_text()
    assert (
        "{{" not in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    )


def test_a_class_that_a_run_names_is_imported_for_a_prediction_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"
        "from andrea.attention import ScaledDotProduct\n"
        "class Mine(ScaledDotProduct): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = str(make_run(tmp_path / "one", attention__compatibility="theirs.Mine"))
    words = [run, f"out={tmp_path / 'p.html'}", "predict=andrea-nano"]
    with pytest.raises(UserError, match=r"theirs\.Mine comes from a checkpoint .* add trust=true"):
        output_of(*words)
    assert not (tmp_path / "ran").exists()
    assert "one" in output_of(*words, "trust=true") and (tmp_path / "ran").exists()


def test_fewer_than_four_finished_runs_are_no_fit(tmp_path: Path) -> None:
    for index, size in enumerate((1000, 2000, 4000)):
        make_run(tmp_path / f"r{index}", size, 20 * size)
    make_run(tmp_path / "cut", 9000, 90_000, step=50)
    text = output_of(str(tmp_path), f"out={tmp_path / 'p.html'}")
    assert "no scaling fit: 3 finished runs" in text and "\n* cut: at step 50 of 100\n" in text


def test_the_run_with_the_fewest_bits_per_byte_is_named_if_the_texts_are_equal(runs: Path, tmp_path: Path) -> None:
    best = min(read_runs(find_run_folders([str(runs)]))[0], key=lambda run: run.bpb)
    words = (str(runs), f"out={tmp_path / 'p.html'}")
    assert f"\nfewest bits per byte: {best.name}, {best.bpb:.4f}\n" in output_of(*words)
    make_run(runs / "elsewhere", 5000, 50_000, data="bb")
    assert "fewest bits" not in output_of(*words)


def test_a_figure_of_a_part_of_the_held_out_text_is_compared_with_none(runs: Path, tmp_path: Path) -> None:
    """As of a run whose train.max_minutes left no time to read all of it."""
    best = min(read_runs(find_run_folders([str(runs)]))[0], key=lambda run: run.bpb)
    metrics = runs / best.name / "metrics.jsonl"
    *lines, last, event = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(
        "".join([*lines, *(line.replace('"val/loss"', '"val/tokens": 4321, "val/loss"') for line in (last, event))])
    )
    text = output_of(str(runs), f"out={tmp_path / 'p.html'}")
    assert f"\n{best.name}: the figures are of 4,321 held-out tokens only; do not compare them\n" in text
    assert "fitted to 7 runs" in text and f"judged on a part of the held-out text: {best.name}\n" in text
    assert "\nfewest bits per byte: " in text and f"fewest bits per byte: {best.name}," not in text


def test_figures_of_evaluate_stand_beside_each_other_with_the_step_if_it_is_not_the_results(tmp_path: Path) -> None:
    asked = {"metric": "acc", "chance": 0.25, "n": 30, "about": ""}
    for name, size, value, step in (("one", 1000, 0.5, 100), ("two", 2000, 0.75, 50)):
        run = make_run(tmp_path / name, size, 20 * size)
        figure = Figure("andrea_names", value=value, standard_error=0.1, **asked)
        append_figures(run, Checkpoint(run / "checkpoints" / "step", {"step": step}), [figure], {})
    text = output_of(str(tmp_path), f"out={tmp_path / 'p.html'}")
    line = "andrea_names acc (30 questions, chance 0.250): one 0.500 ± 0.100; two 0.750 ± 0.100 at step 50"
    assert f"\n{line}\n" in text and line in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_runs_on_different_data_are_not_fitted(runs: Path, tmp_path: Path) -> None:
    make_run(runs / "elsewhere", 5000, 50_000, data="bb")
    text = output_of(str(runs), f"out={tmp_path / 'p.html'}")
    assert "no scaling fit: the runs were trained on different data" in text and "warning: data differ" in text


def test_a_fit_over_two_recipes_has_a_caution(runs: Path, tmp_path: Path) -> None:
    make_run(runs / "other", 5000, 50_000, optimizer__learning_rate=0.5)
    text = output_of(str(runs), f"out={tmp_path / 'p.html'}")
    assert re.search(r"caution: .* differ in optimizer\.learning_rate", text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no run given"),
        (["runs=a", "out=x.png"], "must end in .html"),
        (["runs=a", "predict_tokens=5"], "predict=andrea-480m"),
        (["runs=a", "predict=andrea-nano", "predict_tokens=-5"], "predict_tokens=-5 must be greater"),
        (["runs=a", "seed=-1"], "seed=-1 must be from 0"),
        (["runs=a", "predcit=x"], "did you mean predict"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        configure(CompareConfig, "compare", words)
