"""Many runs from one command line, each of the length that its size asks for, named by what it is."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from conftest import run_script, tiny_words
from insight.compare.run_folders import make_run

from andrea.api.command_line import configure
from andrea.cli.sweep import result_lines, run_name, wait_for
from andrea.config import RunConfig, UserError
from andrea.model.size import count_parameters, flops_per_token
from andrea.training.planning.length import with_length_and_name

BYTE_VOCABULARY = 257


@pytest.mark.slow
def test_a_sweep_trains_all_its_runs_and_its_last_line_names_what_failed(
    tmp_path: Path, notes: Path, script, capfd
) -> None:
    words = tiny_words(tmp_path, notes, "train.steps=1,0,2", "seed=7", "name=mine", "train.sample_tokens=0")
    code, out, _ = run_script(script("train"), ["-m", *words], capfd)
    assert code == 2 and out.splitlines()[-1] == "sweep: 2 of 3 runs done; failed: train.steps=0 (exit code 2)"
    best = "sweep: fewest bits per byte: andrea-nano-512-seed7-steps=2-mine, "
    assert out.splitlines()[-3].startswith(best)
    assert out.splitlines()[-2].endswith(f" compare {tmp_path / 'runs'}/*-mine")
    runs = {path.parent.name: yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/config.yaml")}
    assert sorted(runs) == [f"andrea-nano-{tokens}-seed7-steps={n}-mine" for tokens, n in ((256, 1), (512, 2))]
    assert {config["train"]["max_minutes"] for config in runs.values()} == {None}


def test_no_run_of_a_sweep_is_the_best_if_one_was_judged_on_a_part_of_the_text(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"nano-{size}-seed1-mine", size) for size in (1000, 2000)]
    best = "sweep: fewest bits per byte: nano-2000-seed1-mine, "
    assert result_lines(tmp_path, "mine", [[]], [])[0].startswith(best)
    metrics = runs[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"val/loss"', '"val/tokens": 4321, "val/loss"'))
    (line,) = result_lines(tmp_path, "mine", [[]], [])
    assert line.startswith("sweep: compare the runs: ")


@pytest.mark.slow
def test_a_sweep_runs_in_a_folder_whose_name_hydra_cannot_read(
    tmp_path: Path, notes: Path, script, capfd, monkeypatch
) -> None:
    place = tmp_path / "josé a=b, 100%#"
    place.mkdir()
    monkeypatch.chdir(place)
    words = tiny_words(Path(), notes, "train.steps=1", "seed=7,8", "train.sample_tokens=0")
    code, out, error = run_script(script("train"), ["-m", *words], capfd)
    assert code == 0, error
    assert out.splitlines()[-3].startswith("sweep: fewest bits per byte: ")
    assert len(list(place.glob("runs/*/config.yaml"))) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model=andrea-nano,andrea-12"], "model=andrea-12 "),
        (["train.stps=1,2"], "train.steps"),
        (["seed"], "key=value"),
        (["data.path={a,b", "seed=1,2"], "data.path={a,b"),
        (["seed=1,2", "seed=3"], "seed=1,2 and seed=3 both set seed"),
        (["name=a,b"], "name holds all runs"),
        (["hydra.nonsense=1", "seed=1,2"], "hydra.nonsense=1 is refused by Hydra"),
        (["hydra/launcher=nope", "seed=1,2"], "hydra/launcher=nope"),
        (["hydra.sweep.dir=${nope}", "seed=1,2"], "hydra.sweep.dir"),
        (["train.eval_every=glob(*)"], "train.eval_every=glob(*) has no values"),
        (["name=../..", "seed=1,2"], "name='../..' is not a folder name"),
        (["optimizer.weight_decay=" + "[" * 3000, "seed=1,2"], "optimizer.weight_decay="),
        (["optimizer.weight_decay=" + "1," * 3000, "seed=1,2"], "6000 characters"),
    ],
)
def test_a_wrong_sweep_is_one_line_and_starts_nothing(
    words: list[str], named: str, tmp_path: Path, script, capsys
) -> None:
    code, out, error = run_script(script("train"), ["--multirun", f"runs_dir={tmp_path / 'runs'}", *words], capsys)
    assert (code, out) == (2, "") and named in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("config.yaml"))


def test_a_sweep_under_a_file_is_one_line(tmp_path: Path, script, capsys) -> None:
    (tmp_path / "file").touch()
    code, _, error = run_script(script("train"), ["-m", f"runs_dir={tmp_path / 'file'}", "seed=1,2"], capsys)
    assert code == 2 and error.startswith("error: runs_dir: ") and "Not a directory" in error


def test_the_best_run_of_a_sweep_is_one_of_its_own(tmp_path: Path) -> None:
    """Beside a sweep whose name ends in the same way, and a run of the same name that is not done."""
    names = ["nano-1.20e+17-seed1-lr", "nano-2.9M-seed12-lr", "nano-2.9M-seed1-big-lr", "nano-2.9M-seed3-lr"]
    for figure, name in zip((2, 3, 1, 0), names, strict=True):
        (tmp_path / name).mkdir()
        record = {"step": 1, "tokens": 1, "flops": 1, "seconds": 1, "val/bpb": figure}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    words = [["seed=1"], ["seed=12"]]
    best, compare = result_lines(tmp_path, "lr", words, ["seed"])
    assert best == "sweep: fewest bits per byte: nano-1.20e+17-seed1-lr, 2.0000"
    assert compare.endswith(f"compare {tmp_path / names[0]} {tmp_path / names[1]}")


def test_ctrl_c_ends_a_sweep_also_if_the_run_is_done_by_then() -> None:
    """The command interrupts this process, as a terminal does, and ends as if it had just made its last step."""
    done = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(0.5)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for([sys.executable, "-c", done], dict(os.environ))
    finally:
        signal.signal(signal.SIGINT, before)
    assert wait_for([sys.executable, "-c", "import os; os.abort()"], dict(os.environ)) == 134


def test_a_sweep_that_is_told_to_end_ends_its_run_first(tmp_path: Path) -> None:
    """SIGTERM, as of a cluster or of `timeout`, reaches this process alone: the command, which saves, would go on without it."""
    command = (
        "import os, pathlib, signal, sys, time\n"
        f"saved = pathlib.Path({str(tmp_path / 'saved')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (saved.touch(), sys.exit(143)))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt):
        wait_for([sys.executable, "-c", command], dict(os.environ))
    assert (tmp_path / "saved").exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_runs_are_named_by_size_tokens_seed_and_what_else_differs() -> None:
    name = run_name(["model=andrea-12m", "optimizer.learning_rate=0.1", "data.path=a/b"], "g")
    assert name == "{model}-{tokens}-seed{seed}-learning_rate=0.1-path=a_b-g"
    config = with_length_and_name(configure(RunConfig, "train", [f"name={name}", "seed=3", "train.steps=50"]))
    assert config.name == "andrea-nano-205k-seed3-learning_rate=0.1-path=a_b-g"


@pytest.mark.parametrize("model", ["andrea-nano", "andrea-12m"])
def test_steps_follow_from_tokens_a_parameter_or_from_flops(model: str) -> None:
    words = [f"model={model}", "tokenizer=byte", "train.tokens_per_step=2048"]
    by_ratio = with_length_and_name(configure(RunConfig, "train", [*words, "train.tokens_per_parameter=10"]))
    without_table = dataclasses.replace(by_ratio.model, bigram_rows=None)  # the run may leave it out, for so many steps
    parameters = count_parameters(without_table, by_ratio.attention, BYTE_VOCABULARY).total
    assert abs(by_ratio.steps * 2048 - 10 * parameters) <= 1024
    by_flops = with_length_and_name(configure(RunConfig, "train", [*words, "train.flops=1e15"]))
    per_token = flops_per_token(by_flops.model, by_flops.attention, BYTE_VOCABULARY)
    assert abs(by_flops.steps * 2048 * per_token - 1e15) <= 1024 * per_token


def test_a_length_is_given_once() -> None:
    def completed(*words: str) -> RunConfig:
        return with_length_and_name(configure(RunConfig, "train", ["tokenizer=byte", *words]))

    with pytest.raises(UserError, match="leave one out"):
        completed("train.flops=1e15", "train.tokens_per_parameter=10")
    with pytest.raises(UserError, match="train.steps=7 and train.flops=1e"):
        completed("train.flops=1e15", "train.steps=7")
    with pytest.raises(UserError, match="train.flops=1e.30: train.steps=.* must be from 1 to 1099511627776"):
        completed("train.flops=1e30")
    settled = completed("train.flops=1e15")  # what config.yaml keeps, met again on resume
    assert completed("train.flops=1e15", f"train.steps={settled.steps}") == settled
