"""The whole of training, on a tiny model and real text: it learns, stops, saves, resumes, refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_script, settings_in, tiny_command, tiny_words, with_own_mounts
from head_options import ALL_KINDS, HEAD_OPTIONS, SCORES, words_of
from torch._inductor.cpu_vec_isa import pick_vec_isa

from andrea.checkpoint import best_of, checkpoints_of, newest_whole, read_checkpoint
from andrea.runtime.compiling import configure_compiler
from andrea.runtime.device import Choice
from andrea.runtime.files import StorageFailed
from andrea.runtime.program import typed_command
from andrea.text.shards import DataLost
from andrea.training.evaluation import Evaluator
from andrea.training.parallel.saver import Saver
from andrea.training.planning.length import TimeBudget
from andrea.training.records.run_folder import read_lines
from andrea.training.step import Batch, TrainingStep

# Of the machine rather than of the run: these may differ between equal runs.
TIMINGS = {"seconds", "train/tokens_per_second", "train/seconds_per_step", "train/peak_memory_bytes"}


def metrics(run: Path) -> list[dict]:
    return [
        {key: value for key, value in record.items() if key not in TIMINGS}
        for record in read_lines(run / "metrics.jsonl")
    ]


def tensors_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def only_run(tmp_path: Path) -> Path:
    return next(path for path in (tmp_path / "runs").iterdir() if (path / "config.yaml").exists())


def test_a_run_learns_and_leaves_what_the_contract_names(tiny_run, tmp_path: Path) -> None:
    assert tiny_run("name=a", "train.steps=30") == 0
    run = tmp_path / "runs" / "a"
    records = read_lines(run / "metrics.jsonl")
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert losses[0] > 5 and losses[-1] < 4
    assert all({"step", "tokens", "flops", "seconds"} <= record.keys() for record in records)
    done, last = records[-1], checkpoints_of(run)[-1]
    assert done["event"] == "done" and done["checkpoint"] == str(last) and last.name == "step-00000030"
    assert done["val/bpb"] == [record["val/bpb"] for record in records if "val/bpb" in record][-2]
    assert {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"} <= {
        p.name for p in last.iterdir()
    }
    assert (run / "config.yaml").exists() and best_of(run) is not None
    assert [sample["step"] for sample in read_lines(run / "samples.jsonl")][-1] == 30
    assert len(checkpoints_of(run)) <= 4  # keep=3, and the best


@pytest.mark.parametrize(
    "option",
    [ALL_KINDS, *(pytest.param(option, marks=[pytest.mark.slow, pytest.mark.long]) for option in HEAD_OPTIONS)],
)
def test_stopping_and_resuming_is_bit_for_bit_the_undisturbed_run(
    option: str, tiny_run, notes: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.mkdir()
    for note in notes.iterdir():
        (short / note.name).write_bytes(note.read_bytes()[:100])
    words = [f"data.path={short}", "model.dropout=0.1", "optimizer.muon_rows=equal"]
    words += ["optimizer.average_half_life=3", *words_of(option)]
    words += [*words_of(SCORES), *words_of("bigrams"), "attention.window=[8, null]"]
    tiny_run("name=whole", *words)
    with pytest.MonkeyPatch.context() as patch:
        batch = TrainingStep.batch

        def interrupted(self: TrainingStep, step: int) -> Batch:
            if step == 6:
                assert self.loader.reordered  # the text is read again, with its documents in another order
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(self, step)

        patch.setattr(TrainingStep, "batch", interrupted)
        assert tiny_run("name=parts", *words) == 143
    assert checkpoints_of(tmp_path / "runs" / "parts")[-1].name == "step-00000007"
    assert metrics(tmp_path / "runs" / "parts")[-1]["event"] == "interrupted"
    assert tiny_run("name=parts", "resume=auto", f"data.path={short}") == 0
    whole, parts = (newest_whole(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert tensors_equal(whole.model_tensors(), parts.model_tensors())
    assert tensors_equal(whole.optimizer_tensors(), parts.optimizer_tensors())
    ours, theirs = (metrics(tmp_path / "runs" / name) for name in ("parts", "whole"))
    assert [{**record, "checkpoint": None} for record in ours] == [{**record, "checkpoint": None} for record in theirs]


def test_an_evaluation_whose_text_cannot_be_read_is_made_up_for(
    tiny_run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are saved. Found by failing every call of a resumed run."""
    words = ["train.steps=4", "train.eval_every=4", "train.save_every=4"]
    assert tiny_run("name=whole", *words) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "validate", lambda *given: (_ for _ in ()).throw(DataLost("gone")))
        with pytest.raises(DataLost):
            tiny_run("name=a", *words)
    assert newest_whole(tmp_path / "runs" / "a").step == 4

    def full(saver: Saver, state: dict[str, Any]) -> None:
        assert newest_whole(saver.folder).step == 4  # a process that is killed while it writes does not lose it either
        raise StorageFailed("full")

    with monkeypatch.context() as patch:  # a full disk while that checkpoint is written anew does not cost it
        patch.setattr(Saver, "save", full)
        with pytest.raises(StorageFailed):
            tiny_run("name=a", "resume=auto", *words)
    assert newest_whole(tmp_path / "runs" / "a").step == 4
    assert tiny_run("name=a", "resume=auto", *words) == 0
    assert not list((tmp_path / "runs" / "a" / "checkpoints").glob("aside-*"))
    ours, theirs = (
        [record["val/bpb"] for record in metrics(tmp_path / "runs" / name) if "val/bpb" in record]
        for name in ("a", "whole")
    )
    assert ours == [theirs[0], *theirs]  # told in both attempts, of which the first could not save
    ends = [newest_whole(tmp_path / "runs" / name).state for name in ("a", "whole")]
    assert ends[0]["best_bpb"] == ends[1]["best_bpb"] == ours[-1]


def test_resume_auto_starts_goes_on_and_says_when_it_is_done(tiny_run, tmp_path: Path, capsys) -> None:
    assert tiny_run("name=a", "resume=auto", "train.steps=4") == 0
    assert "nothing to resume yet" in capsys.readouterr().out
    assert tiny_run("name=a", "resume=auto", "train.steps=4") == 0
    assert "already done" in capsys.readouterr().out
    assert tiny_run("resume=auto", "train.steps=8") == 0  # the newest run, where no name is given
    out = capsys.readouterr().out
    assert "step 4" in out and "changed train.steps: 4 → 8" in out
    assert [record["step"] for record in read_lines(tmp_path / "runs" / "a" / "metrics.jsonl")][-1] == 8


def test_a_run_killed_before_its_first_checkpoint_starts_again(tiny_run, tmp_path: Path) -> None:
    tiny_run("name=a", "train.steps=4")
    run = tmp_path / "runs" / "a"
    for path in checkpoints_of(run):
        shutil.rmtree(path)
    assert tiny_run("name=a", "train.steps=4", "resume=auto") == 0
    assert [r["step"] for r in read_lines(run / "metrics.jsonl") if "event" in r] == [4]
    for path in checkpoints_of(run):
        (path / "state.json").unlink()
    with pytest.raises(ValueError, match="every checkpoint .* is damaged"):
        tiny_run("name=a", "train.steps=4", "resume=auto")


def test_a_run_that_would_become_another_is_refused(tiny_run) -> None:
    tiny_run("name=a", "train.steps=4")
    with pytest.raises(ValueError, match="model.n_layer.*init_from"):
        tiny_run("name=a", "resume=auto", "train.steps=8", "model.n_layer=3")
    with pytest.raises(ValueError, match="exists"):
        tiny_run("name=a")


def test_changed_data_are_noticed_on_resume(tiny_run, notes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in notes.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tiny_run("name=a", f"data.path={copy}", "train.steps=4")
    for path in copy.iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(ValueError, match="data differ from the data of"):
        tiny_run("name=a", f"data.path={copy}", "train.steps=8", "resume=auto")


def test_weights_alone_start_a_new_run(tiny_run, tmp_path: Path) -> None:
    tiny_run("name=a", "train.steps=4")
    source = checkpoints_of(tmp_path / "runs" / "a")[-1]
    assert tiny_run("name=b", f"init_from={source}", "train.steps=1", "optimizer.learning_rate=1e-9",
                    "optimizer.embedding_learning_rate=1e-9", "optimizer.matrix_learning_rate=1e-9",
                    "optimizer.convolution_learning_rate=1e-9") == 0  # fmt: skip
    started, ended = read_checkpoint(source).model_tensors(), newest_whole(tmp_path / "runs" / "b").model_tensors()
    assert all(torch.allclose(started[name], ended[name], atol=1e-6) for name in started)


def test_weights_bring_their_model_and_their_tokenizer(notes: Path, tmp_path: Path, script, capsys) -> None:
    train = script("train")
    train(tiny_words(tmp_path, notes, "name=a", "train.steps=4", "tokenizer=bpe", "tokenizer.vocab_size=300",
                     "attention.window=16"))  # fmt: skip
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.txt").write_text("another text than that of the first run\n" * 200)
    places = [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}", f"data.path={tmp_path / 'other'}"]
    words = [*places, "data=text", "logger=none", "compile=off", "threads=1", "train.steps=2", "train.sample_tokens=0",
             "train.tokens_per_step=64"]  # fmt: skip
    run = tmp_path / "runs" / "a"
    for number, named in enumerate(("a", str(run), str(run / "checkpoints" / "best"), str(checkpoints_of(run)[-1]))):
        assert train([*words, f"name=b{number}", f"init_from={named}"]) == 0
    assert f"\nweights: {checkpoints_of(run)[-1]} (init_from)\n" in capsys.readouterr().out
    before, after = (newest_whole(path).state for path in (run, tmp_path / "runs" / "b1"))
    for group, key in (("model", "n_layer"), ("model", "sequence_length"), ("attention", "window")):
        assert before["config"][group][key] == after["config"][group][key]
    assert before["tokenizer"] == after["tokenizer"] and before["data"] != after["data"]
    shutil.rmtree(run)  # the second run has a tokenizer of its own
    assert train([*places, "data=text", "logger=none", "name=b1", "resume=auto", "train.steps=3"]) == 0


def test_weights_of_another_model_or_tokenizer_are_refused_before_any_text_is_read(
    trained: Path, tmp_path: Path, script
) -> None:
    words = [
        f"runs_dir={tmp_path / 'runs'}",
        f"data_dir={tmp_path / 'data'}",
        "data=text",
        "data.path=absent",
        "name=c",
    ]
    for typed, match in (
        (["model.n_layer=1"], r"model\.n_layer=1 \(init_from has 2\); leave model\.n_layer out"),
        (["model=gpt2", "model.sequence_length=32"], r"model\.d_model=768 \(init_from has 32\)"),
        (["attention=bilinear"], r"attention\.compatibility=bilinear \(init_from has scaled_dot\)"),
        (["tokenizer=bpe"], r"tokenizer byte-257-\w+, but this run uses tokenizer=bpe.*leave tokenizer out"),
    ):
        with pytest.raises(ValueError, match=match):
            script("train")([*words, f"init_from={trained}", *typed])
    with pytest.raises(ValueError, match=r"init_from=frist is neither .* did you mean first"):
        script("train")([f"runs_dir={trained.parent}", "init_from=frist", "compile=off"])
    assert list(tmp_path.iterdir()) == []


def test_the_time_limit_stops_cleanly_and_the_run_goes_on(tiny_run, tmp_path: Path) -> None:
    assert tiny_run("name=a", "train.steps=100000", "train.max_minutes=0.0001") == 0  # over before the first step ends
    run = tmp_path / "runs" / "a"
    last = read_lines(run / "metrics.jsonl")[-1]
    assert last["event"] == "stopped" and last["val/bpb"] > 0 and 0 < last["step"] < 100000
    assert newest_whole(run).step == last["step"]


@pytest.mark.parametrize("last", ["eval", "save"])
def test_the_step_at_which_the_time_is_over_is_evaluated_once_and_its_checkpoint_has_the_figures(
    last: str, tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation, or a save without one, is due at this step."""
    monkeypatch.setattr(TimeBudget, "is_over", lambda budget: len(budget.elapsed) >= 6)  # while step 6 runs
    assert tiny_run("name=a", "train.steps=40", "train.max_minutes=60", f"train.{last}_every=6") == 0
    run = tmp_path / "runs" / "a"
    *_, evaluated, event = [record for record in metrics(run) if "val/bpb" in record]
    steps = [record["step"] for record in metrics(run) if "val/bpb" in record and "event" not in record]
    assert (
        steps == ([6] if last == "eval" else [4, 6]) == [sample["step"] for sample in read_lines(run / "samples.jsonl")]
    )
    state = newest_whole(run).state
    assert state["step"] == state["evaluated_step"] == event["step"] == 6
    assert state["val_bpb"] == evaluated["val/bpb"] == event["val/bpb"]


def test_nothing_changes_with_the_micro_batch(tiny_run, tmp_path: Path) -> None:
    for size in (8, 3):
        tiny_run(f"name=of{size}", f"train.micro_batch={size}", "precision=fp32")
    first, second = (
        [r["train/loss"] for r in metrics(tmp_path / "runs" / f"of{size}") if "train/loss" in r] for size in (8, 3)
    )
    assert first == pytest.approx(second, rel=1e-3)


@pytest.mark.parametrize(("where", "precision"), [("weight", "fp32"), ("gradient", "bf16")])
def test_what_is_not_finite_never_reaches_the_weights(
    where: str, precision: str, tiny_run, tmp_path: Path, capsys
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        batch, accumulate, seen = TrainingStep.batch, TrainingStep.accumulate, {}

        def numbered(self: TrainingStep, step: int) -> Batch:
            seen["step"] = step
            return batch(self, step)

        def poisoned(self: TrainingStep, of_step: Batch) -> tuple:
            if seen["step"] == 5 and where == "weight":
                with torch.no_grad():
                    self.parallel.model.blocks[0].mlp.up.weight[0, 0] = float("nan")
            summed = accumulate(self, of_step)
            if seen["step"] == 5 and where == "gradient":
                self.parallel.model.blocks[1].mlp.down.weight.grad[0, 0] = float("inf")
            seen["model"] = {name: tensor.clone() for name, tensor in self.parallel.model.state_dict().items()}
            seen["parallel"] = self.parallel
            return summed

        patch.setattr(TrainingStep, "batch", numbered)
        patch.setattr(TrainingStep, "accumulate", poisoned)
        assert tiny_run("name=a", f"precision={precision}") == 3
    after = seen["parallel"].model.state_dict()
    assert all(
        torch.equal(
            after[name],
            tensor,
        )
        or where == "weight"
        and "mlp.up" in name
        for name, tensor in seen["model"].items()
    )
    out = capsys.readouterr().out
    assert "step 6" in out and "gradient norm" in out and "step-00000004" in out
    assert newest_whole(tmp_path / "runs" / "a").step == 4
    (line,) = (line for line in out.splitlines() if line.startswith("error: step 6"))
    remedies = settings_in(line)
    assert [["precision=fp32"] in remedies, len(remedies)] == [precision == "bf16", 1 + (precision == "bf16")]
    for number, remedy in enumerate(remedies):  # each is a command that continues the run, with another setting
        shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / f"a{number}")
        assert tiny_run(f"name=a{number}", *remedy, "resume=auto") == 0
        said = capsys.readouterr().out
        assert "step-00000004: step 4" in said and f"changed {remedy[0].partition('=')[0]}: " in said


@pytest.mark.parametrize("step", [6, 8])
def test_what_is_not_finite_in_the_optimizer_is_never_saved(step: int, tiny_run, tmp_path: Path, capsys) -> None:
    """It reaches the weights with the next update: found by the loss of the step after, or when it comes to saving."""
    with pytest.MonkeyPatch.context() as patch:
        batch = TrainingStep.batch

        def poisoned(self: TrainingStep, steps_before: int) -> Batch:
            if steps_before + 1 == step:
                self.optimizer.state_tensors()["blocks.1.mlp.up.weight/momentum"][0, 0] = float("nan")
            return batch(self, steps_before)

        patch.setattr(TrainingStep, "batch", poisoned)
        assert tiny_run("name=a") == 3
    out = capsys.readouterr().out
    assert f"error: step {step + 1 if step % 4 else step}:" in out and "not finite" in out and "step-00000004" in out
    assert ("blocks.1.mlp.up.weight is not finite: nothing was saved" in out) == (step % 4 == 0)
    assert [path.name for path in checkpoints_of(tmp_path / "runs" / "a")] == ["step-00000004"]


def test_out_of_memory_halves_the_micro_batch_and_does_the_step_again(tiny_run, tmp_path: Path, capsys) -> None:
    with pytest.MonkeyPatch.context() as patch:
        post_init = TrainingStep.__post_init__

        def with_a_small_device(self: TrainingStep) -> None:
            post_init(self)
            roomy = self.loss_sum

            def small(tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
                if len(tokens) > 2:
                    raise torch.OutOfMemoryError("as a card with too little memory says")
                return roomy(tokens, *others)

            self.loss_sum = small

        patch.setattr(TrainingStep, "__post_init__", with_a_small_device)
        assert tiny_run("name=small", "precision=fp32") == 0
    assert "train.micro_batch=2" in capsys.readouterr().out
    tiny_run("name=roomy", "precision=fp32")
    small, roomy = (
        [r["train/loss"] for r in metrics(tmp_path / "runs" / n) if "train/loss" in r] for n in ("small", "roomy")
    )
    assert small == pytest.approx(roomy, rel=1e-3)


def test_each_remedy_for_too_little_memory_is_a_command_that_works(
    tiny_run, tmp_path: Path, capsys, script, notes: Path
) -> None:
    steps, post_init = [], TrainingStep.__post_init__

    def with_a_full_device(self: TrainingStep) -> None:
        def full(*batch: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("as a card with too little memory says")

        post_init(self)
        self.loss_sum = full
        steps.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__post_init__", with_a_full_device)
        code, _, said = run_script(script("train"), tiny_words(tmp_path, notes, "name=a"), capsys)
    line = said.splitlines()[-1]
    assert code == 2 and line.startswith("error: out of memory with train.micro_batch=1; remedies: ")
    steps[0].micro_batch = 4  # with several ranks it is not halved
    remedies = [["train.micro_batch=2"], ["train.activation_checkpointing=true"], ["model.sequence_length=16"]]
    assert [settings_in(line), settings_in(steps[0].remedy())] == [remedies[1:], remedies]
    for number, remedy in enumerate(remedies):
        assert tiny_run(f"name=a{number}", "train.steps=2", *remedy) == 0


def test_several_sources_are_scored_each(tiny_run, notes: Path, tmp_path: Path) -> None:
    sources = f"{{one: {{kind: text, path: '{notes}', weight: 0.7}}, two: {{kind: text, path: '{notes / 'dis.py'}'}}}}"
    assert tiny_run("name=a", "data=mixture", "data.path=", f"data.sources={sources}", "train.eval_tokens=200") == 0
    record = next(record for record in metrics(tmp_path / "runs" / "a") if "val/bpb" in record)
    assert {"val/one/bpb", "val/two/bpb", "val/one/loss"} <= record.keys()


@pytest.mark.parametrize("where", ["evaluation.Evaluator.draw_attention", "trainer.Trainer.conclude"])
def test_a_run_that_is_killed_after_its_last_checkpoint_is_ended_by_the_next_command(
    where: str, tiny_run, tmp_path: Path, monkeypatch
) -> None:
    class Killed(BaseException):
        pass

    def kill_at_the_last_step(evaluator_or_endings: Any) -> None:
        if evaluator_or_endings.progress.step == 12:
            raise Killed

    assert tiny_run("name=whole") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"andrea.training.{where}", kill_at_the_last_step)
        with pytest.raises(Killed):
            tiny_run("name=a")
    assert tiny_run("name=a", "resume=auto") == 0
    whole, ended = tmp_path / "runs" / "whole", tmp_path / "runs" / "a"
    assert [{**record, "checkpoint": None} for record in metrics(ended)] == [
        {**record, "checkpoint": None} for record in metrics(whole)
    ]
    ours, theirs = (read_lines(run / "samples.jsonl") for run in (ended, whole))
    assert [(each["step"], each["text"]) for each in ours] == [(each["step"], each["text"]) for each in theirs]
    before = (ended / "metrics.jsonl").read_bytes()
    assert tiny_run("name=a", "resume=auto") == 0 and (ended / "metrics.jsonl").read_bytes() == before


def test_the_plan_is_printed_and_nothing_is_written(tiny_run, tmp_path: Path, capsys) -> None:
    assert tiny_run("dry_run=true") == 0
    out = capsys.readouterr().out
    for word in ("parameters", "embedding", "FLOPs per token", "gradients", "optimizer", "activations", "tokens per step",
                 "micro-batch", "steps", "expected time", "an estimate from steps made now"):  # fmt: skip
        assert word in out
    assert not (tmp_path / "runs").exists() and not (tmp_path / "data").exists()
    tiny_run("dry_run=true", "train.micro_batch=2", "compile=blocks")
    assert "from steps made now without torch.compile" in capsys.readouterr().out


def test_a_dry_run_of_a_run_to_resume_shows_what_remains(tiny_run, tmp_path: Path, capsys) -> None:
    def lines(*words: str) -> dict[str, str]:
        capsys.readouterr()
        assert tiny_run("dry_run=true", "resume=auto", "name=a", *words) == 0
        printed = (line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        return {words[0]: words[1] for words in printed}

    tiny_run("name=a", "train.steps=6", "train.save_every=3")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    tokens = metrics(tmp_path / "runs" / "a")[-1]["tokens"] // 6  # in a step
    extended = lines("train.steps=10")
    assert extended["steps"] == "4 remain of 10"
    assert extended["tokens"] == f"{4 * tokens:,} remain of {10 * tokens:,}"
    assert "steps made now" in extended["expected"] and "step 6" in extended["resuming"]
    done = lines("train.steps=6")
    assert done["steps"] == "0 remain of 6" and "resuming" not in done
    assert lines("name=b")["steps"] != done["steps"]  # nothing to resume: the plan of a new run
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_the_best_checkpoint_is_chosen_on_the_same_held_out_tokens(tiny_run, tmp_path: Path) -> None:
    """The last evaluation reads the whole split; `best` compares its figure on the part that earlier ones read."""
    words = ["train.steps=6", "train.eval_every=2", "train.save_every=2", "train.keep=9"]
    assert tiny_run("name=part", *words, "train.eval_tokens=60") == 0
    states = [read_checkpoint(path).state for path in checkpoints_of(tmp_path / "runs" / "part")]
    assert states[0]["compared_bpb"] == states[0]["val_bpb"] and states[-1]["compared_bpb"] != states[-1]["val_bpb"]
    best = min(states, key=lambda state: state["compared_bpb"])
    assert best_of(tmp_path / "runs" / "part") == f"step-{best['step']:08d}"
    assert states[-1]["best_bpb"] == best["compared_bpb"]
    assert tiny_run("name=whole", *words) == 0
    whole = newest_whole(tmp_path / "runs" / "whole").state
    assert whole["compared_bpb"] == whole["val_bpb"] == states[-1]["val_bpb"]


def test_help_lists_the_keys(script, capsys) -> None:
    assert script("train")(["--help"]) == 0
    assert f"{typed_command('train')} [key=value" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.untraced
def test_compiled_runs_repeat_exactly(tiny_run, tmp_path: Path) -> None:
    for name in "ab":
        tiny_run(f"name={name}", "compile=on", "train.steps=4", "train.eval_every=2", "train.save_every=2")
    assert tensors_equal(*(newest_whole(tmp_path / "runs" / name).model_tensors() for name in "ab"))


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id_in_wandb_and_a_new_run_has_another(tiny_run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, steps in (("a", 2), ("b", 2), ("b", 4)):
        assert (
            tiny_run(f"name={name}", "logger=wandb", f"train.steps={steps}", "train.save_every=2", "resume=auto") == 0
        )
    (other,), (first, last) = (
        [read_checkpoint(path).state["wandb_id"] for path in checkpoints_of(tmp_path / "runs" / name)] for name in "ab"
    )
    assert first == last != other and first and other


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.untraced
@pytest.mark.parametrize(
    ("how", "graphs", "more"),
    [
        ("on", 1, []),
        ("blocks", 2, ["train.activation_checkpointing=true"]),
        # the heads of many layers are measured in each step
        ("blocks", 2, ["attention=qk_clip", "model.qk_norm=false", "model.n_layer=9"]),
    ],
)
def test_one_graph_serves_a_whole_run(tiny_run, how: str, graphs: int, more: list[str]) -> None:
    """Steps of several micro-batches, evaluation with its last, shorter batch, samples, measuring heads, saving."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    words = [f"compile={how}", "train.micro_batch=3", "train.eval_tokens=1000"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert tiny_run("name=a", *more, *words) == 0
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


@contextmanager
def failing_compiler(tmp_path: Path) -> Iterator[None]:
    """torch.compile has an empty cache, and a C++ compiler whose disk is full."""
    compiler = tmp_path / "compiler"
    says = "a.h:3:1: fatal error: cannot write PCH file: No space left on device"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && exec g++ $1\necho '{says}' >&2; exit 1\n")
    compiler.chmod(0o755)
    torch._dynamo.reset()
    configure_compiler(torch.device("cpu"))
    pick_vec_isa()  # torch keeps the answer: with this compiler it would be "no vectors", for every later test of the process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        # torch's own `patch` restores the setting; monkeypatch would leave it deleted, and every later test of this process
        # without a compiler.
        with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
            yield


@pytest.mark.slow
def test_a_machine_that_cannot_compile_trains_without(tiny_run, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("andrea.training.planning.plan.choose_compile", lambda *asked: Choice("on", "for the test"))
    with failing_compiler(tmp_path):
        assert tiny_run("name=a", "compile=auto", "train.steps=2", "model.d_mlp=60") == 0
    assert "training continues without it" in capsys.readouterr().out
    assert (
        json.loads((checkpoints_of(tmp_path / "runs" / "a")[-1] / "state.json").read_text())["config"]["compile"]
        == "off"
    )


@pytest.mark.parametrize("mode", [pytest.param("on", marks=pytest.mark.slow), "blocks"])
def test_compiling_that_was_asked_for_and_fails_is_one_line(
    mode: str, tmp_path: Path, notes: Path, script, capsys
) -> None:
    words = tiny_words(tmp_path, notes, "name=a", f"compile={mode}", "train.steps=2", "model.d_mlp=60")
    with failing_compiler(tmp_path):
        code, _, said = run_script(script("train"), words, capsys)
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert code == 2 and "Traceback" not in said
    assert (
        "C++ compile error: cannot write PCH file: No space left on device); set compile=off, or compile=auto" in line
    )
    again = [word for word in words if not word.startswith("compile=")]
    assert script("train")([*again, "compile=off", "resume=auto"]) == 0  # nothing is in the way of the next command


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.3, *(pytest.param(each, marks=pytest.mark.long) for each in (0.0, 0.6, 0.9))])
def test_a_killed_run_goes_on_as_if_nothing_had_been(moment: float, tmp_path: Path, notes: Path, tiny_run) -> None:
    """kill -9 at some moment, then the same command line again: the same weights as uninterrupted, bit for bit."""
    tiny_run("name=whole", "train.save_every=1", "train.eval_every=100", "train.sample_tokens=0")
    quiet = ["train.save_every=1", "train.eval_every=100", "train.sample_tokens=0"]
    words = tiny_command(tmp_path, notes, "name=killed", *quiet, "resume=auto")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "runs" / "killed" / "checkpoints"
    deadline = time.monotonic() + 60
    while not checkpoints.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(moment * 0.5)
    process.kill()
    process.wait()
    for path in checkpoints_of(tmp_path / "runs" / "killed"):
        read_checkpoint(path)  # whatever a reader would look at is whole
    assert subprocess.run(words, stdout=subprocess.DEVNULL).returncode == 0
    whole, killed = (newest_whole(tmp_path / "runs" / name) for name in ("whole", "killed"))
    assert tensors_equal(whole.model_tensors(), killed.model_tensors())
    assert tensors_equal(whole.optimizer_tensors(), killed.optimizer_tensors())


def test_a_second_process_in_the_same_run_folder_is_refused(tmp_path: Path, notes: Path, script, capsys) -> None:
    first = subprocess.Popen(
        tiny_command(tmp_path, notes, "name=a", "train.steps=100000"), stdout=subprocess.PIPE, text=True
    )
    for line in first.stdout:
        if line.startswith("step"):
            break
    run = tmp_path / "runs" / "a"
    words = tiny_words(tmp_path, notes, "name=a", "train.steps=100000")
    for more in (["resume=auto"], []):
        code, _, error = run_script(script("train"), [*words, *more], capsys)
        assert code == 2 and error.count("\n") == 1
        assert ("is in use by another process" in error and str(first.pid) in error) if more else "exists" in error
    first.send_signal(signal.SIGTERM)
    first.communicate()
    records = read_lines(run / "metrics.jsonl")
    assert first.returncode == 143 and [r["step"] for r in records] == sorted(r["step"] for r in records)
    assert script("train")([*words, "resume=auto", "train.max_minutes=0.001"]) == 0  # nobody holds it any more


def test_ctrl_c_saves_prints_the_resume_command_and_exits_130(tmp_path: Path, notes: Path) -> None:
    words = tiny_command(tmp_path, notes, "name=a", "train.steps=100000")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait() == 130
    assert "resume=auto" in rest and newest_whole(tmp_path / "runs" / "a").step > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2500k", *(pytest.param(each, marks=pytest.mark.long) for each in ("2m", "3m"))])
def test_a_full_disk_ends_the_run_in_one_line_and_what_was_whole_is_whole(
    size: str, tmp_path: Path, notes: Path, tiny_run
) -> None:
    """Exit code 5, the checkpoints written before are whole, and with space again the run ends as an uninterrupted one."""
    quiet = ["train.steps=40", "train.save_every=1", "train.keep=100", "train.eval_every=100", "train.sample_tokens=0"]
    quiet += ["model.bigram_rows=null"]  # several checkpoints are to fit on the disk
    tiny_run("name=whole", *quiet)
    small = tmp_path / "small"
    small.mkdir()
    command = tiny_command(tmp_path, notes, "name=a", *quiet, f"runs_dir={small}")
    mount = f'mount -t tmpfs -o size={size} none "$0"'
    tried = with_own_mounts(mount, small, command, after='cp -r "$0" "$0-copy"')
    assert tried.returncode == 5 and tried.stderr.count("\n") == 1, tried.stderr
    assert all(words in tried.stderr for words in ("cannot be written", "No space left on device", "resume=auto"))
    copy = tmp_path / "small-copy"
    saved = checkpoints_of(copy / "a")
    assert saved and all(read_checkpoint(path).step == number for number, path in enumerate(saved, 1))
    assert not list((copy / "a" / "checkpoints").glob(".writing-*"))
    assert tiny_run("name=a", *quiet, f"runs_dir={copy}", "resume=auto") == 0
    assert tensors_equal(*(newest_whole(run).model_tensors() for run in (copy / "a", tmp_path / "runs" / "whole")))


@pytest.mark.parametrize("words", [["train.log_every=1"], ["train.save_every=1", "train.log_every=100"]])
def test_a_run_folder_that_vanishes_is_named_and_not_made_again(
    words: list[str], tmp_path: Path, notes: Path, script, capsys, monkeypatch
) -> None:
    run, away = tmp_path / "runs" / "a", tmp_path / "away"
    batch = TrainingStep.batch

    def with_the_folder_renamed(self: TrainingStep, step: int) -> Batch:
        if step == 6:
            run.rename(away)
        return batch(self, step)

    monkeypatch.setattr(TrainingStep, "batch", with_the_folder_renamed)
    words = tiny_words(tmp_path, notes, "name=a", "train.sample_tokens=0", *words)
    code, _, said = run_script(script("train"), words, capsys)
    assert code == 5 and said.count("\n") == 1 and "free some space" not in said
    assert (
        f"No such file or directory: the folder {run} was removed or renamed; move it back and continue with " in said
    )
    assert " name=a resume=auto " in said and said.endswith(", or start a new run\n")
    assert not run.exists()
    away.rename(run)
    monkeypatch.undo()
    assert script("train")([*words, "resume=auto"]) == 0


def test_a_user_error_reaches_the_terminal_as_one_line(script, capsys) -> None:
    code, out, err = run_script(script("train"), ["train.setps=3"], capsys)
    assert code == 2 and err.count("\n") == 1 and "did you mean train.steps" in err
