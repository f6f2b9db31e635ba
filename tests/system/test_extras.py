"""Samples, pages and loggers: none of them can cost a checkpoint, and none of them ends a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import run_script, tiny_words

from andrea.api.run import train_one
from andrea.checkpoint import checkpoints_of, newest_whole
from andrea.generation import Engine
from andrea.training import evaluation
from andrea.training.evaluation import Evaluator
from andrea.training.health.health import Health
from andrea.training.parallel import saver
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


def test_a_page_that_cannot_be_written_is_one_line_and_the_run_goes_on(
    tmp_path: Path, notes: Path, script, capsys
) -> None:
    run = tmp_path / "runs" / "a"
    script("train")(tiny_words(tmp_path, notes, "name=a", "train.steps=4", "train.sample_tokens=0"))
    (run / "lens").touch()  # a file where the folder of the pages would be
    capsys.readouterr()
    words = ["name=a", "resume=auto"]
    code, out, err = run_script(script("train"), tiny_words(tmp_path, notes, *words), capsys)
    assert code == 0 and not err and saved_steps(run) == STEPS
    assert out.count("writing the lens page failed") == 1
    assert "step 4: writing the lens page failed (FileExistsError" in out
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


def test_heads_that_cannot_be_scored_are_one_line_and_the_run_goes_on(
    tmp_path: Path, notes: Path, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*asked: object) -> dict:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("andrea.insight.lens.scores.probe_scores", broken)
    words = ["name=a", "train.sample_tokens=0"]
    code, out, _ = run_script(script("train"), tiny_words(tmp_path, notes, *words), capsys)
    assert code == 0 and out.count("failed") == 1
    assert "scoring the attention heads failed (ZeroDivisionError: a bug); training continues" in out
    *_, record = (each for each in read_lines(tmp_path / "runs/a/metrics.jsonl") if "attention/entropy_nats" in each)
    assert "attention/in_context_nats" in record and "attention/heads/induction_score" not in record


def test_the_sample_has_a_repetition_penalty_and_the_texts_that_are_judged_have_none(
    tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, so that a model of twelve steps repeats itself. Health must still see the model as it is."""
    runs, judged, judge = {}, [], Health.judge
    monkeypatch.setattr(
        Health, "judge", lambda self, evidence: (judged.append(evidence.texts), judge(self, evidence))[1]
    )
    for penalty in ("1", "1e9"):
        monkeypatch.setattr(evaluation, "SAMPLE_PENALTY", float(penalty))
        monkeypatch.setattr(evaluation, "SAMPLE_TEMPERATURE", 0.0)
        assert tiny_run(f"name={penalty}", "data.sample_prompt=a", "train.sample_tokens=30") == 0
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


WORDS = [
    "train.sample_tokens=7",
    "train.keep=1",
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Path:
    place = tmp_path_factory.mktemp("uninterrupted")
    assert train_one(tiny_words(place, notes, "name=a", *WORDS)).exit_code == 0
    return place / "runs" / "a"


def contents(run: Path) -> dict[str, object]:
    """The run's files by name, but those that hold times; of these and of folders only the names."""
    with_times = ("state.json", "manifest.json", "metrics.jsonl", "config.yaml", "run.json", "run.html")
    paths = {str(path.relative_to(run)): path for path in run.rglob("*")}
    read = {name: path.name not in with_times and path.is_file() for name, path in paths.items()}
    found: dict[str, object] = {name: path.read_bytes() if read[name] else None for name, path in paths.items()}
    samples = [(sample["step"], sample["text"]) for sample in read_lines(run / "samples.jsonl")]
    states = [newest_whole(run).state[key] for key in ("step", "best_bpb", "compared_bpb", "torch_random")]
    steps = [(record["step"], record.get("event")) for record in read_lines(run / "metrics.jsonl")]
    return found | {"samples.jsonl": samples, "states": states, "steps": steps}


@pytest.mark.parametrize("step", [8, 12])
@pytest.mark.parametrize(
    "killed_in", [(saver, "mark_and_prune"), (Evaluator, "draw_attention"), (Evaluator, "show_sample")]
)
def test_what_a_kill_after_the_save_cost_is_made_up_for_on_resume(
    killed_in: tuple[object, str], step: int, tiny_run, uninterrupted: Path, tmp_path: Path, monkeypatch
) -> None:
    """The mark of the best checkpoint, the removal of older ones, the lens page, the sample: all follow from the disk."""
    place, name = killed_in
    work, calls = getattr(place, name), iter(STEPS)

    def killed(*given: object) -> None:
        if next(calls) == step:
            raise KeyboardInterrupt
        work(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(place, name, killed)
        tiny_run("name=a", *WORDS)
    run = tmp_path / "runs" / "a"
    assert newest_whole(run).step == step and contents(run) != contents(uninterrupted)
    assert tiny_run("name=a", "resume=auto", *WORDS) == 0
    assert contents(run) == contents(uninterrupted)


def test_the_end_of_a_run_that_was_killed_before_it_gave_its_lock_back_is_made_again(
    tiny_run, uninterrupted: Path, tmp_path: Path
) -> None:
    """After a loss of power, the record of the end may be on the disk and the sample before it not."""
    run = tmp_path / "runs" / "a"
    shutil.copytree(uninterrupted, run)
    (run / ".lock").write_text("process 1 on elsewhere\n")
    samples = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text("".join(samples[:-1]))
    (run / "lens" / "step-00000012.html").unlink()
    assert tiny_run("name=a", "resume=auto", *WORDS) == 0
    assert contents(run) == contents(uninterrupted)
