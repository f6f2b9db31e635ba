"""Samples, pages and loggers: none of them can cost a checkpoint, and none of them ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_script, tiny_words

from andrea.checkpoint import checkpoints_of, newest_whole
from andrea.generation import Engine
from andrea.training.evaluation import Evaluator
from andrea.training.health.health import Health
from andrea.training.records.run_folder import read_lines

STEPS = [4, 8, 12]


def saved_steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints_of(run)]


def test_a_sample_prompt_longer_than_the_window_is_refused_before_training(tiny_run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.sample_prompt has 33 tokens.*sequence_length=32.*train.sample_tokens=0"):
        tiny_run("name=a", "data.sample_prompt=" + 33 * "a")
    assert not (tmp_path / "runs").exists()
    assert tiny_run("name=a", "train.steps=4", "data.sample_prompt=" + 32 * "a") == 0
    assert tiny_run("name=b", "train.steps=4", "data.sample_prompt=" + 33 * "a", "train.sample_tokens=0") == 0


def test_a_long_lens_prompt_is_cut(tiny_run, tmp_path: Path) -> None:
    assert tiny_run("name=a", "train.steps=4", "train.lens_prompt=" + 99 * "a") == 0
    assert [path.name for path in (tmp_path / "runs" / "a" / "lens").iterdir()] == ["step-00000004.html"]


def test_a_page_that_cannot_be_written_is_one_line_and_the_run_goes_on(
    tmp_path: Path, notes: Path, script, capsys
) -> None:
    run = tmp_path / "runs" / "a"
    script("train")(tiny_words(tmp_path, notes, "name=a", "train.steps=4", "train.lens_prompt="))
    (run / "lens").touch()  # a file where the folder of the pages would be
    capsys.readouterr()
    words = ["name=a", "resume=auto", "train.lens_prompt=null"]
    code, out, err = run_script(script("train"), tiny_words(tmp_path, notes, *words), capsys)
    assert code == 0 and not err and saved_steps(run) == STEPS
    assert out.count("writing the lens page failed") == 1
    assert "step 8: writing the lens page failed (FileExistsError" in out
    assert (run / "run.log").read_text().count("Traceback") == 1


def test_samples_that_cannot_be_written_are_one_line_and_the_run_goes_on(
    tmp_path: Path, notes: Path, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*asked: object) -> list[str]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Engine, "write", broken)
    code, out, err = run_script(script("train"), tiny_words(tmp_path, notes, "name=a"), capsys)
    run = tmp_path / "runs" / "a"
    assert code == 0 and not err and saved_steps(run) == STEPS and not read_lines(run / "samples.jsonl")
    assert out.count("failed") == 1 and "writing samples failed (ZeroDivisionError: a bug); training continues" in out
    assert "in broken" in (run / "run.log").read_text()
    records = read_lines(run / "metrics.jsonl")
    assert [record["step"] for record in records if "health/findings/loss_above_uniform" in record] == STEPS


def test_the_sample_has_a_repetition_penalty_and_the_texts_that_are_judged_have_none(
    tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, so that a model of twelve steps repeats itself. Health must still see the model as it is."""
    runs, judged, judge = {}, [], Health.judge
    monkeypatch.setattr(
        Health, "judge", lambda self, evidence: (judged.append(evidence.texts), judge(self, evidence))[1]
    )
    for penalty in ("1", "1e9"):
        words = [f"train.sample_repetition_penalty={penalty}", "train.sample_temperature=0", "train.sample_tokens=30"]
        assert tiny_run(f"name={penalty}", "data.sample_prompt=a", *words) == 0
        runs[penalty] = tmp_path / "runs" / penalty
    plain, penalised = ([sample["text"] for sample in read_lines(run / "samples.jsonl")] for run in runs.values())
    assert len(plain) == len(penalised) == len(STEPS)
    assert all(len(set(one)) < len(set(other)) for one, other in zip(plain, penalised, strict=True)), (plain, penalised)
    assert judged[: len(STEPS)] == judged[len(STEPS) :] and all(judged)


@pytest.mark.parametrize(
    ("extra", "limit"),
    [
        ("draw_attention", []),
        ("show_sample", []),
        ("show_sample", ["train.steps=100000", "train.max_minutes=0.001"]),
    ],
)
def test_the_checkpoint_is_written_before_the_extras(
    extra: str, limit: list[str], tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies in an extra has saved the step already."""

    def dies(self: Evaluator) -> None:
        raise SystemExit(9)

    monkeypatch.setattr(Evaluator, extra, dies)
    with pytest.raises(SystemExit):
        tiny_run("name=a", *limit)
    run = tmp_path / "runs" / "a"
    assert newest_whole(run).step == [r["step"] for r in read_lines(run / "metrics.jsonl") if "val/bpb" in r][-1]


def test_a_sample_that_a_kill_after_the_save_cost_is_made_up_for_on_resume(
    tmp_path: Path, notes: Path, script, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["health.samples=3", "train.sample_tokens=7", "train.sample_every=4", "parallel.async_save=false"]
    assert script("train")(tiny_words(tmp_path, notes, "name=whole", *words)) == 0

    def killed(evaluator: Evaluator) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Evaluator, "show_sample", killed)
        script("train")(tiny_words(tmp_path, notes, "name=killed", *words))
    killed_run = tmp_path / "runs" / "killed"
    assert saved_steps(killed_run) == [4] and not read_lines(killed_run / "samples.jsonl")
    assert script("train")(tiny_words(tmp_path, notes, "name=killed", "resume=auto", *words)) == 0
    texts = [
        [(sample["step"], sample["text"]) for sample in read_lines(run / "samples.jsonl")]
        for run in (tmp_path / "runs" / "whole", killed_run)
    ]
    assert texts[0] == texts[1] and [step for step, _ in texts[0]] == STEPS
