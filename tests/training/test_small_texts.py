"""Training on a text so small that the model memorises it: what the run says, and which checkpoint is its result."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

import andrea
from andrea.__main__ import main
from andrea.checkpoint import best_of, checkpoints_of, read_checkpoint, step_of
from andrea.training.records.run_folder import read_lines


class Memorised(NamedTuple):
    """A run of a small text, and the lines that it printed."""

    folder: Path
    text: Path
    lines: list[str]


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    """2 kB of sentences with chance words, of which training text tells little about held-out text."""
    words, chance = "a light rose over grey hills while nobody spoke of rain or harvest again".split(), random.Random(7)
    path = tmp_path / "small.txt"
    path.write_text("".join(" ".join(chance.choices(words, k=9)) + ".\n" for _ in range(40)))
    return path


@pytest.fixture
def memorised(tiny_run, small_text: Path, tmp_path: Path, capsys) -> Memorised:
    """A run that was evaluated and saved every ten steps, and ends far above its best validation loss."""
    words = ["data=text", f"data.path={small_text}", "train.steps=120", "train.eval_every=10", "train.save_every=10"]
    capsys.readouterr()
    assert tiny_run("name=small", *words, "optimizer.learning_rate=0.05", "optimizer.matrix_learning_rate=0.1") == 0
    return Memorised(tmp_path / "runs" / "small", small_text, capsys.readouterr().out.splitlines())


def test_the_result_of_a_run_is_its_best_evaluation(memorised: Memorised, tmp_path: Path, capsys) -> None:
    folder, _, lines = memorised
    figures = {r["step"]: r["val/bpb"] for r in read_lines(folder / "metrics.jsonl") if "val/bpb" in r}
    best = min(figures, key=lambda step: figures[step])
    assert best < 100 and figures[120] > figures[best] + 0.5
    assert best_of(folder) == f"step-{best:08d}"
    assert f"done at step 120 of 120 · {figures[120]:.4f} bits/byte" in lines[-3]
    assert f"result: step {best}, which had the best evaluation, {figures[best]:.4f} bits/byte" in lines[-2]
    assert lines[-1].startswith("next: ") and lines[-1].endswith(f"step-{best:08d}")
    runs_dir = f"runs_dir={tmp_path / 'runs'}"
    for named in ([], ["checkpoint=small"]):
        assert main(["sample", runs_dir, *named, "max_new_tokens=2", "prompt=a"]) == 0
        said = capsys.readouterr().err
        assert f"step {best} had the best evaluation" in said and f"· step {best} ·" in said
    assert andrea.load("small", runs_dir=tmp_path / "runs").checkpoint.step == best
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert f"{figures[best]:.4f}" in capsys.readouterr().out
    assert main(["compare", str(folder), f"out={tmp_path / 'page.html'}"]) == 0
    assert f"small: the figures are of step {best}, the best evaluation" in capsys.readouterr().out
    assert f"{figures[best]:.4f}" in (folder / "run.html").read_text()


def test_a_run_goes_on_from_its_newest_checkpoint(memorised: Memorised, tiny_run, capsys) -> None:
    for words in (["name=small", "resume=auto"], [f"resume={memorised.folder}"]):
        steps = step_of(checkpoints_of(memorised.folder)[-1])
        assert tiny_run(*words, f"data.path={memorised.text}", f"train.steps={steps + 1}") == 0
        assert f"resuming {memorised.folder}/checkpoints/step-{steps:08d}" in capsys.readouterr().out


def test_a_figure_of_an_earlier_step_does_not_make_a_checkpoint_the_best(tiny_run, tmp_path: Path) -> None:
    assert tiny_run("name=a", "train.steps=9", "train.eval_every=2", "train.save_every=3", "train.keep=9") == 0
    states = {step_of(path): read_checkpoint(path).state for path in checkpoints_of(tmp_path / "runs" / "a")}
    assert {step: state["evaluated_step"] for step, state in states.items()} == {3: 2, 6: 6, 9: 9}
    assert states[3]["best_bpb"] is None and states[6]["best_bpb"] == states[6]["compared_bpb"]
