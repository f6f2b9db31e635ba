"""Training on a text so small that the model memorises it: what the run says, and which checkpoint is its result."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import settings_in, tiny_words

import andrea
from andrea.__main__ import main
from andrea.api.command_line import configure
from andrea.checkpoint import best_of, checkpoints_of, newest_whole, read_checkpoint, step_of
from andrea.config import RunConfig
from andrea.model.size import count_parameters
from andrea.text.shards import DataLost
from andrea.text.tokenizer import vocabulary_for
from andrea.training.evaluation import Evaluator
from andrea.training.planning import length
from andrea.training.planning.length import most_steps_for_text
from andrea.training.planning.plan import Situation, with_choices
from andrea.training.records.run_folder import read_lines


class Memorised(NamedTuple):
    """A run of a small text, and the lines that it printed."""

    folder: Path
    text: Path
    lines: list[str]


@pytest.fixture(scope="module")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 kB of sentences with chance words, of which training text tells little about held-out text."""
    words, chance = "a light rose over grey hills while nobody spoke of rain or harvest again".split(), random.Random(7)
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("".join(" ".join(chance.choices(words, k=9)) + ".\n" for _ in range(40)))
    return path


@pytest.fixture(scope="module")
def memorised_once(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Memorised:
    """A run that was evaluated and saved every ten steps, and ends far above its best validation loss."""
    place, said = tmp_path_factory.mktemp("memorised"), io.StringIO()
    words = ["name=small", "train.steps=120", "train.eval_every=10", "train.save_every=10"]
    # With these, it ends 0.6 to 1.3 bits per byte above its best on each of four seeds.
    words += ["optimizer.learning_rate=0.05", "optimizer.matrix_learning_rate=0.1"]
    words += ["optimizer.weight_decay=0", "optimizer.muon_rows=equal"]
    with contextlib.redirect_stdout(said):
        assert main(["train", *tiny_words(place, small_text, *words)]) == 0
    return Memorised(place / "runs" / "small", small_text, said.getvalue().splitlines())


@pytest.fixture
def memorised(memorised_once: Memorised, tmp_path: Path) -> Memorised:
    """A copy that a test may change."""
    folder = tmp_path / "runs" / "small"
    shutil.copytree(memorised_once.folder, folder)
    return memorised_once._replace(folder=folder)


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
    trained = andrea.train(runs_dir, "resume=small")  # it is done already
    assert [trained.figures[key] for key in ("step", "val/bpb", "event")] == [best, figures[best], "done"]
    assert trained.figures["checkpoint"] == str(folder / "checkpoints" / f"step-{best:08d}")
    assert trained.load().checkpoint.step == best
    capsys.readouterr()
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert f"{figures[best]:.4f}" in capsys.readouterr().out
    assert main(["compare", str(folder), f"out={tmp_path / 'page.html'}"]) == 0
    assert f"small: the figures are of step {best}, the best evaluation" in capsys.readouterr().out
    assert f"{figures[best]:.4f}" in (folder / "run.html").read_text()


@pytest.mark.slow
def test_a_long_run_says_how_often_it_reads_the_text_and_every_remedy_works(memorised: Memorised, tmp_path) -> None:
    folder, text, lines = memorised
    assert any("120 steps of 256 tokens, 17." in line and "epochs" in line for line in lines)
    proposal = next(line for line in lines if line.startswith("small text: 120 steps read its"))
    assert "times" in proposal and proposal.endswith("train.steps=auto would plan 60 steps")
    findings = {each["finding"]: each["message"] for each in read_lines(folder / "health.jsonl") if each["begins"]}
    assert {"many_epochs", "overfitting"} <= findings.keys()
    places = [f"data.path={text}", "data=text", f"runs_dir={tmp_path / 'runs'}", "dry_run=true"]
    for message in findings.values():
        assert settings_in(message), message
        for remedy in settings_in(message):
            assert main(["train", *places, *remedy]) == 0, remedy


def for_text(run: RunConfig, corpus: SimpleNamespace) -> RunConfig:
    keys = ("train.steps", "model.bigram_rows", "optimizer.muon_rows", "optimizer.weight_decay")
    return with_choices(run, [], Situation(None, corpus), keys)


@pytest.fixture
def planned(tiny_run, small_text: Path, tmp_path: Path, capsys) -> Callable[..., list[str]]:
    """Trains on the small text for as long as the run itself plans; returns the lines that it printed."""

    def trained(name: str, *words: str) -> list[str]:
        auto = [f"train.{key}=auto" for key in ("steps", "eval_every", "save_every")]
        auto += ["optimizer.warmup_steps=2"]
        keys = {word.partition("=")[0] for word in words}
        words = (*(word for word in auto if word.partition("=")[0] not in keys), *words)
        assert tiny_run(f"name={name}", f"data.path={small_text}", *words) == 0
        return capsys.readouterr().out.splitlines()

    return trained


def test_the_length_is_planned_for_a_small_text(planned, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(length, "FEWEST_JUDGED_TOKENS", 50)
    lines = planned("a")
    plan = next(line for line in lines if line.startswith("small text: "))
    assert "which the 700 steps of andrea-nano would read" in plan and "planned 60 steps, 8.9" in plan
    records = read_lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    evaluations = {record["step"]: record for record in records if "val/loss" in record and "event" not in record}
    assert list(evaluations) == [*range(6, 61, 6)]
    best = min(evaluations, key=lambda step: evaluations[step]["val/compared_bpb"])
    assert best_of(tmp_path / "runs" / "a") == f"step-{best:08d}"
    for record in evaluations.values():  # the two halves of the held-out text, of about equally many bytes
        mean = (record["val/compared_bpb"] + record["val/judged_bpb"]) / 2
        assert record["val/compared_bpb"] != record["val/judged_bpb"] and mean == pytest.approx(
            record["val/bpb"], rel=0.02
        )
    judged = evaluations[best]["val/judged_bpb"]
    shown = f"judged on the half of the held-out text that was not used to choose the step: {judged:.4f} bits/byte"
    assert shown in lines


def test_the_planned_length_by_hand() -> None:
    """75 epochs for as many tokens as parameters; they grow with the power 0.75 of tokens over parameters, and with the
    root of a step's tokens beyond 4,096. The warm-up is at most half of the run, which has at least one step."""

    def planned_steps(n_token: int, warmup_steps: int = 0, tokens_per_step: int = 4096) -> int:
        words = ["train.steps=auto", f"train.tokens_per_step={tokens_per_step}", "train.micro_batch=1"]
        run = configure(RunConfig, "train", [*words, f"optimizer.warmup_steps={warmup_steps}"])
        parts = [SimpleNamespace(train=range(n + 1)) for n in (n_token // 3, n_token - n_token // 3)]
        tokenizer = SimpleNamespace(n_vocab=257)
        return most_steps_for_text(run, SimpleNamespace(sources=parts, tokenizer=tokenizer))

    run = configure(RunConfig, "train", [])
    n = count_parameters(dataclasses.replace(run.model, bigram_rows=None), run.attention, 257).total
    assert planned_steps(n) == pytest.approx(75 * n / 4096, abs=1.01)
    assert planned_steps(16 * n) == pytest.approx(8 * 75 * 16 * n / 4096, abs=1.01)
    assert planned_steps(n, tokens_per_step=2048) == pytest.approx(75 * n / 2048, abs=1.01)
    assert planned_steps(n, tokens_per_step=16 * 1024) == pytest.approx(2 * 75 * n / (16 * 1024), abs=1.01)
    assert [planned_steps(9, warmup_steps) for warmup_steps in (0, 1, 5, 40)] == [1, 2, 10, 80]


def test_the_epochs_that_the_program_plans_are_no_finding(planned, tmp_path: Path) -> None:
    lines = planned("a")
    assert float(re.search(r", ([\d.]+) epochs", next(line for line in lines if "of 256 tokens" in line))[1]) > 4
    assert "many_epochs" not in "\n".join(lines)
    planned("b", "train.steps=40", "train.eval_every=20")
    found = [each["finding"] for each in read_lines(tmp_path / "runs" / "b" / "health.jsonl")]
    assert "many_epochs" in found


def test_a_held_out_text_of_one_window_is_not_divided(planned, monkeypatch) -> None:
    """The part that chooses is whole windows: it would be all of the text, and nothing would be left to judge."""
    monkeypatch.setattr(length, "FEWEST_JUDGED_TOKENS", 50)
    lines = planned("a", "model.sequence_length=256")
    assert any(line.startswith("the held-out text is too small to judge") for line in lines)


def test_a_run_named_by_its_tokens_goes_on_in_its_folder(planned, tmp_path: Path) -> None:
    """As the runs of a sweep are: the name tells the tokens of the recipe, and the text has made the run shorter."""
    planned("{model}-{tokens}")
    (run,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(checkpoints_of(run)[-1])
    words = ["model.sequence_length=32", "train.tokens_per_step=256", f"data_dir={tmp_path / 'data'}"]
    assert main(["train", f"runs_dir={run.parent}", "name={model}-{tokens}", "resume=auto", *words]) == 0
    assert list(run.parent.iterdir()) == [run] and step_of(checkpoints_of(run)[-1]) == 60


def test_a_held_out_text_too_small_to_judge_is_said_and_a_typed_length_is_kept(
    planned, tiny_run, small_text, capsys
) -> None:
    assert any(line.startswith("the held-out text is too small to judge") for line in planned("a"))
    assert tiny_run("name=b", f"data.path={small_text}", "train.steps=24", "train.eval_every=auto") == 0
    out = capsys.readouterr().out
    assert "done at step 24 of 24" in out and "judge" not in out and "small text" not in out


def test_a_small_text_gets_a_smaller_vocabulary_and_a_stronger_weight_decay() -> None:
    """By hand: 0.06 for each epoch after the first, times (parameters / tokens)^0.7; between 0.1 and 4."""

    def decay(n_token: int, steps: int, *words: str) -> float | str:
        run = configure(RunConfig, "train", [f"train.steps={steps}", *words])
        parts = [SimpleNamespace(train=range(n_token + 1))]
        return for_text(run, SimpleNamespace(sources=parts, tokenizer=SimpleNamespace(n_vocab=257))).optimizer.decay

    run = configure(RunConfig, "train", [])
    n = count_parameters(dataclasses.replace(run.model, bigram_rows=None), run.attention, 257).total
    steps = 1000
    assert decay(steps * 4096, steps) == decay(10 * n, steps) == 0.1
    assert decay(n // 10, steps) == pytest.approx(min(4.0, 0.06 * (steps * 40960 / n - 1) * 10**0.7), abs=0.01)
    assert decay(n, 3 * n // 4096) == pytest.approx(0.12, abs=0.01)
    assert decay(n, 30 * n // 4096) == pytest.approx(0.06 * 29, abs=0.01)
    assert decay(n, steps, "optimizer.weight_decay=0.3") == 0.3
    sizes = {0: 512, 100_000: 512, 1_115_394: 1024, 3_000_000: 2048, 8_000_000: 4096, 10**12: 4096}
    assert {n_byte: vocabulary_for(n_byte) for n_byte in sizes} == sizes


def test_a_text_that_is_read_more_than_twice_gets_no_table_of_bigrams_and_plain_muon() -> None:
    def parts(n_token: int, *words: str) -> tuple[int | None, str]:
        run = configure(RunConfig, "train", ["train.steps=100", *words])
        corpus = SimpleNamespace(sources=[SimpleNamespace(train=range(n_token + 1))])
        corpus.tokenizer = SimpleNamespace(n_vocab=257)
        planned = for_text(run, corpus)
        return planned.model.bigram_rows, planned.optimizer.muon_rows

    tokens = 100 * 4096
    assert parts(tokens) == parts(tokens // 2) == (32768, "equal")
    assert parts(tokens // 2 - 1) == (None, "none")
    assert parts(tokens // 10, "model.bigram_rows=50", "optimizer.muon_rows=equal") == (50, "equal")
    assert parts(tokens, "model.bigram_rows=null", "optimizer.muon_rows=none") == (None, "none")
    assert parts(tokens, "optimizer=adamw") == (32768, "none")


def test_what_auto_became_is_said_and_saved(planned, tmp_path: Path) -> None:
    lines = planned("a")
    (said,) = (line for line in lines if line.startswith("weight decay: "))
    (no_table,) = (line for line in lines if line.startswith("bigrams: no table, because the text is read 8.9 times"))
    state = newest_whole(tmp_path / "runs" / "a").state
    assert any(
        line.startswith("rows of Muon's updates: as they are, because the text is read 8.9 times") for line in lines
    )
    assert state["config"]["model"]["bigram_rows"] is None and state["config"]["optimizer"]["muon_rows"] == "none"
    assert state["config"]["optimizer"]["weight_decay"] == float(said.split()[2].rstrip(",")) > 0.1
    assert {"optimizer.weight_decay", "optimizer.muon_rows", "model.bigram_rows"} <= set(state["left_auto"])


@pytest.mark.slow
def test_the_rate_falls_once_validation_becomes_worse_and_a_resumed_run_does_the_same(
    planned, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(length, "EPOCHS", 500.0)
    hot = [
        "optimizer.learning_rate=0.1",
        "optimizer.matrix_learning_rate=0.2",
        "train.keep=50",
        "optimizer.weight_decay=0.1",
    ]
    hot += ["train.eval_every=10", "train.save_every=10"]
    lines = planned("whole", *hot)
    changed = next(line for line in lines if line.startswith("the validation loss has risen: the learning rate falls"))
    at, steps = (int(re.search(rf"{word} (\d+)", changed)[1]) for word in ("from step", "ends at step"))
    run = tmp_path / "runs" / "whole"
    assert step_of(checkpoints_of(run)[-1]) == steps < 260
    rates = {r["step"]: r["train/rate"] for r in read_lines(run / "metrics.jsonl") if "train/rate" in r}
    assert rates[at] == 1.0 and rates[at + 10] < 1.0
    shutil.copytree(run, tmp_path / "runs" / "parts")
    for path in checkpoints_of(tmp_path / "runs" / "parts"):
        if step_of(path) >= at:
            shutil.rmtree(path)
    (tmp_path / "runs" / "parts" / "run.json").write_bytes((run / "run.json").read_bytes())
    assert changed in planned("parts", "resume=auto", *hot)
    ours, theirs = (
        read_checkpoint(tmp_path / "runs" / name / "checkpoints" / f"step-{steps:08d}") for name in ("parts", "whole")
    )
    weights, expected = ours.model_tensors(), theirs.model_tensors()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


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


FROZEN = [
    "optimizer.learning_rate=1e-30",
    "optimizer.matrix_learning_rate=1e-30",
    "optimizer.embedding_learning_rate=1e-30",
    "optimizer.convolution_learning_rate=1e-30",
]


PATIENT = [*FROZEN, "train.steps=40", "train.eval_every=2", "train.save_every=2", "train.patience=2", "train.keep=100",
           "optimizer.decay_fraction=0.5", "optimizer.warmup_steps=0", "train.sample_tokens=0"]  # fmt: skip


def test_patience_begins_the_decay_and_then_ends_the_run_also_if_it_was_resumed(
    tiny_run, tmp_path: Path, capsys
) -> None:
    """The weights stay as they are, so that no evaluation after the first is a new best."""
    words = PATIENT
    assert tiny_run("name=whole", *words) == 0
    out = capsys.readouterr().out
    assert "no new best in train.patience=2 evaluations: the learning rate falls from step 6 on" in out
    assert "ends at step 12 instead of 40" in out
    assert "stopped at step 10 of 12, no new best in train.patience=2 evaluations" in out
    assert "next: " in out and "continue with" not in out
    run = tmp_path / "runs" / "whole"
    whole = newest_whole(run)
    assert whole.step == 10
    for step in (4, 8):  # before the decay began, and after it
        assert tiny_run(f"resume={run / 'checkpoints' / f'step-{step:08d}'}", "name=whole", *words) == 0
        again = newest_whole(run)
        assert (again.step, again.state["planned_steps"]) == (10, 12)
        assert again.state["evaluations_since_best"] == whole.state["evaluations_since_best"]


def test_with_patience_a_new_best_is_saved_also_between_two_saves(tiny_run, tmp_path: Path, capsys) -> None:
    """Else every evaluation before the first save would be a new best, and none of them could be the run's result."""
    assert tiny_run("name=a", *PATIENT, "train.save_every=40") == 0
    out = capsys.readouterr().out
    assert "no new best in train.patience=2 evaluations: the learning rate falls from step 6 on" in out
    assert "stopped at step 10 of 12, no new best" in out
    assert [step_of(path) for path in checkpoints_of(tmp_path / "runs" / "a")] == [2, 10]


def test_patience_counts_an_evaluation_that_a_resumed_run_makes_up_for(tiny_run, tmp_path: Path, monkeypatch) -> None:
    """Its held-out text could not be read at first."""

    def lost(evaluator: Evaluator, *given: Any) -> Any:
        if evaluator.progress.step == 6:
            raise DataLost("gone")
        return validate(evaluator, *given)

    assert tiny_run("name=whole", *PATIENT) == 0
    with monkeypatch.context() as patch:
        validate = Evaluator.validate
        patch.setattr(Evaluator, "validate", lost)
        with pytest.raises(DataLost):
            tiny_run("name=a", *PATIENT)
    assert tiny_run("name=a", "resume=auto", *PATIENT) == 0
    whole, resumed = (newest_whole(tmp_path / "runs" / name) for name in ("whole", "a"))
    assert (resumed.step, resumed.state["planned_steps"]) == (whole.step, whole.state["planned_steps"]) == (10, 12)
