"""Whole runs whose health is judged: what is recorded, what stops a run, how many samples are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from andrea.api.command_line import configure
from andrea.checkpoint import newest_whole
from andrea.config import RunConfig
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT
from andrea.text.corpus import open_corpus
from andrea.training.health import health
from andrea.training.health import text_quality as samples
from andrea.training.health.text_quality import ReferenceText, judge_texts
from andrea.training.records.run_folder import read_lines

pytestmark = pytest.mark.untraced

FAILING = [
    "optimizer.matrix_learning_rate=5", "optimizer.learning_rate=3", "optimizer.embedding_learning_rate=3",
    "optimizer.clip_norm=null", "optimizer.warmup_steps=0", "optimizer.weight_decay=0", "optimizer.decay_fraction=0",
    "train.eval_every=10", "train.save_every=100", "train.steps=30",
]  # fmt: skip


@pytest.mark.slow
def test_a_failing_run_is_named_at_the_first_evaluation_and_goes_on(tiny_run, tmp_path: Path, capsys) -> None:
    assert tiny_run("name=a", *FAILING) == 0
    run = tmp_path / "runs" / "a"
    alerts = read_lines(run / "health.jsonl")
    assert alerts[0]["step"] == 10 and alerts[0]["finding"] == "loss_above_uniform" and alerts[0]["begins"]
    assert "set optimizer.clip_norm=1" in alerts[0]["message"]
    out = capsys.readouterr().out
    assert out.count("health: step 10: loss_above_uniform: ") == 1
    judged = [r for r in read_lines(run / "metrics.jsonl") if "health/findings/loss_above_uniform" in r]
    assert [record["step"] for record in judged] == [10, 20, 30]
    assert judged[0]["health/findings/loss_above_uniform"] == 1 and judged[0]["health/update_ratio"] > 0


def test_on_failure_stop_saves_and_exits_with_4_and_the_run_can_be_resumed(tiny_run, tmp_path: Path, capsys) -> None:
    assert tiny_run("name=a", "health.on_failure=stop", *FAILING) == 4
    run = tmp_path / "runs" / "a"
    assert newest_whole(run).step == 10
    last = read_lines(run / "metrics.jsonl")[-1]
    assert last["event"] == "failed" and "loss_above_uniform" in last["health/failed"]
    out = capsys.readouterr().out
    assert "stopped at step 10 of 30" in out and "resume=auto" in out and out.endswith(" health.on_failure=warn\n")
    assert tiny_run("name=a", "resume=auto", "health.on_failure=warn", *FAILING) == 0
    assert newest_whole(run).step == 30
    again = [alert for alert in read_lines(run / "health.jsonl") if alert["finding"] == "loss_above_uniform"]
    assert [alert["step"] for alert in again if alert["begins"]] == [10]  # reported once, not again after the resume


def test_warnings_never_stop_a_run(tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MANY_EPOCHS", 0.0001)
    assert tiny_run("name=a", "health.on_failure=stop", "train.steps=8") == 0
    assert [alert["finding"] for alert in read_lines(tmp_path / "runs" / "a" / "health.jsonl")] == ["many_epochs"]


def test_a_model_that_writes_loops_is_named(tiny_run, tmp_path: Path, notes: Path) -> None:
    """A real model that has learned nothing but loops, held against real text."""
    loops = {"repeated_word": "region " * 9, "repeated_phrase": "games, " * 9, "repeated_punctuation": "''''' " * 11}
    words = ["train.steps=60", "train.eval_every=60", "train.save_every=60", "train.sample_tokens=0"]
    run = configure(RunConfig, "train", ["data=text", f"data.path={notes}", "tokenizer=byte", f"data_dir={tmp_path}/r"])
    corpus = open_corpus(run.data, run.tokenizer, Path(run.data_dir), lambda line: None)
    reference = ReferenceText([corpus.sources[0].val], corpus.tokenizer, 160)
    for name, loop in loops.items():
        folder = tmp_path / name
        folder.mkdir()
        for part in range(12):
            (folder / f"{part}.txt").write_text(loop * 40)
        assert tiny_run(f"name={name}", f"data.path={folder}", *words) == 0
        checkpoint = newest_whole(tmp_path / "runs" / name)
        config = configure(RunConfig, "train", [f"model.{key}={checkpoint.state['config']['model'][key]}" for key in
                           ("d_model", "n_layer", "n_head", "d_mlp", "sequence_length")])  # fmt: skip
        model = GPT(config.model, config.attention, corpus.tokenizer.n_vocab, corpus.tokenizer.end_of_text)
        model.load_state_dict(checkpoint.model_tensors())
        request = Request(160, num_samples=5, seed=1, sampling=Sampling(temperature=0.8))
        texts = Engine(model, corpus.tokenizer).write(loop[:7], request)
        assert set(judge_texts(texts, reference).findings) == {name}, texts


def test_more_samples_are_judged_where_the_first_are_a_finding(
    tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.sample_tokens=160", "train.steps=16", "train.eval_every=16", "optimizer.warmup_steps=0"]
    monkeypatch.setattr(health, "EARLY_STEPS", 0)
    monkeypatch.setattr(samples, "REPETITION", 2.0)  # never; what a model of 16 steps writes differs by processor
    for name, variety, fewest, most in (("well", 0.001, 1, 5), ("ill", 2.0, 6, 20)):
        monkeypatch.setattr(samples, "LEAST_VARIETY", variety)
        assert tiny_run(f"name={name}", *words) == 0
        records = read_lines(tmp_path / "runs" / name / "metrics.jsonl")
        record = next(record for record in records if "health/text/judged" in record)
        assert fewest <= record["health/text/judged"] <= most  # a text too short is not judged
        assert record["health/findings/poor_text"] == (name == "ill")
