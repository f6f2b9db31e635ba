"""A run that gets another length: what was left `auto` is settled again, and the learning rate's jump is said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import tiny_words

from andrea.api.command_line import configure
from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.config import RunConfig, UserError
from andrea.training.planning.plan import choose_again
from andrea.training.records import Progress
from andrea.training.records.run_folder import read_lines
from andrea.training.resume import describe_rate

AUTO = ["train.eval_every=auto", "train.save_every=auto", "compile=auto"]


@pytest.fixture
def train(tmp_path: Path, notes: Path, script) -> Callable[..., dict]:
    """Trains 8 steps of the tiny model, or resumes with no other words than the given ones. Returns its config.yaml."""

    def trained(*words: str, resumed: bool = False, compiled: str = "compile=off") -> dict:
        places = [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}", "name=a"]
        places += [] if any(word.startswith("resume=") for word in words) else ["resume=auto"]
        quiet = ["train.sample_tokens=0", "train.log_every=1", "precision=fp32"]
        first = [word for word in tiny_words(tmp_path, notes, "train.steps=8", *quiet) if "dir=" not in word]
        given = {word.split("=")[0] for word in words}
        first = [compiled] if resumed else [word for word in first if word.split("=")[0] not in given]
        assert script("train")([*places, *filter(None, first), *words]) == 0
        return yaml.safe_load((tmp_path / "runs" / "a" / "config.yaml").read_text())

    return trained


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change the state.json of the checkpoint."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    content = (path / "state.json").read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_what_was_auto_is_settled_again_for_another_length(train, tmp_path: Path, capsys) -> None:
    config = train(*AUTO)
    assert (config["train"]["eval_every"], config["train"]["save_every"], config["compile"]) == (2, 2, "off")
    for steps, quarter in ((16, 4), (20, 5)):
        config = train(f"train.steps={steps}", resumed=True, compiled="")
        assert (config["train"]["eval_every"], config["train"]["save_every"]) == (quarter, quarter)
        out = capsys.readouterr().out
        assert "changed train.eval_every" not in out and "compile: off → auto" in out
        assert (
            f"recomputed for {steps} steps, because they are set to auto: train.eval_every={quarter}, train.save_every={quarter}"
            in out
        )


def test_what_was_typed_stays(train, capsys) -> None:
    assert train("train.eval_every=3", "train.save_every=auto")["train"]["eval_every"] == 3
    config = train("train.steps=16", resumed=True)
    assert (config["train"]["eval_every"], config["train"]["save_every"]) == (3, 4)
    config = train("train.steps=24", "train.save_every=7", resumed=True)
    assert (config["train"]["eval_every"], config["train"]["save_every"]) == (3, 7)
    assert train("train.steps=32", resumed=True)["train"]["save_every"] == 7


def test_without_a_change_nothing_is_settled_again(train, capsys) -> None:
    config = train(*AUTO, "train.max_minutes=0.0001")
    capsys.readouterr()
    assert train("train.max_minutes=null", resumed=True)["train"]["eval_every"] == config["train"]["eval_every"]
    assert "recomputed" not in capsys.readouterr().out


def test_the_planned_length_is_saved_and_goes_on_until_another_is_asked_for(train, tmp_path: Path, capsys) -> None:
    train("train.save_every=4")
    run = tmp_path / "runs" / "a"
    assert read_checkpoint(checkpoints_of(run)[-1]).state["planned_steps"] == 8
    edit(
        checkpoints_of(run)[-1], lambda state: state.update(planned_steps=11)
    )  # as the run itself would have planned it
    train(resumed=True)
    train("train.steps=8", resumed=True)  # the same words as before: no other length
    assert "already done" in capsys.readouterr().out
    assert [record["step"] for record in read_lines(run / "metrics.jsonl") if record.get("event")][-1] == 11
    train("train.steps=13", resumed=True)
    assert checkpoints_of(run)[-1].name == "step-00000013"


def test_one_length_replaces_another() -> None:
    after = {"train.steps": 20, "train.flops": 1e9, "train.tokens_per_parameter": None, "train.eval_every": 2}
    typed = choose_again(after, {"train.steps"}, ["train.eval_every"], {"train.steps"})
    assert typed == {"train.flops": None, "train.eval_every": "auto"}
    typed = choose_again(after, {"train.flops"}, ["train.steps", "train.eval_every"], {"train.flops"})
    assert typed == {"train.steps": "auto", "train.eval_every": "auto"}
    # Where the number of steps was typed, too:
    typed = choose_again(after, {"train.flops"}, ["train.eval_every"], {"train.flops"})
    assert typed == {"train.steps": "auto", "train.eval_every": "auto"}
    assert choose_again(after, set(), ["train.steps", "train.eval_every"], set()) == {}
    assert choose_again(after, {"precision"}, [], {"precision", "train.steps", "train.flops"}) == {}  # as they were
    with pytest.raises(UserError, match=r"train.steps=20 and train.flops=.* both set the length"):
        choose_again(after, {"train.steps"}, [], {"train.steps", "train.flops"})


def test_a_length_in_operations_replaces_the_steps_of_a_resumed_run(train, capsys) -> None:
    train("train.steps=8")
    config = train("train.flops=6e8", resumed=True)
    assert config["train"]["steps"] > 8 and "changed train.flops: null" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- the learning rate


def rates(run: Path) -> dict[int, float]:
    return {
        record["step"]: record["train/rate"] for record in read_lines(run / "metrics.jsonl") if "train/rate" in record
    }


def test_the_jump_of_the_rate_is_said(train, tmp_path: Path, capsys) -> None:
    train("optimizer.warmup_steps=0")
    train("train.steps=16", resumed=True)
    before, after = rates(tmp_path / "runs" / "a")[8], rates(tmp_path / "runs" / "a")[9]
    line = next(line for line in capsys.readouterr().out.splitlines() if "learning rate: jumps" in line)
    assert f"jumps from {before:.0%} to {after:.0%} of its peak" in line


@pytest.mark.parametrize(("step", "is_said"), [(20, False), (40, False), (70, True)])
def test_only_a_jump_of_the_rate_is_said(step: int, is_said: bool) -> None:
    """The run is extended from 100 to 200 steps; its rate begins to fall after step 40."""
    saved, longer = (configure(RunConfig, "train", [f"train.steps={steps}"]) for steps in (100, 200))
    before, now = Progress(step=step, planned_steps=100), Progress(step=step, planned_steps=200)
    assert (describe_rate(before, saved, now, longer) is not None) == is_said
    assert describe_rate(before, saved, before, saved) is None  # no other length


def test_a_run_beyond_the_length_of_its_small_text_is_done(train, tmp_path: Path, capsys) -> None:
    short = tmp_path / "short.md"
    short.write_text("".join(f"{n} is a number\n" for n in range(200)))
    train("train.steps=300", f"data.path={short}")
    records = read_lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    capsys.readouterr()
    train("train.steps=auto", resumed=True)
    assert "already done" in capsys.readouterr().out
    assert read_lines(tmp_path / "runs" / "a" / "metrics.jsonl") == records
