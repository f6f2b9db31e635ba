"""One run on several ranks, as real processes that torchrun starts: the same run, whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_words, torchrun, with_own_mounts

from andrea.checkpoint import checkpoints_of, newest_whole, read_checkpoint
from andrea.training.records.run_folder import read_lines

# fp32 sums over ranks are made in another order, which moves their last bits (2^-24 = 6e-8); over fifty steps Muon's
# orthogonalisation in fp32 lets that grow to a few units more. In bf16 it would grow by orders of magnitude.
TOLERANCE = 1e-5
TIMINGS = ("seconds", "tokens_per_second", "memory", "checkpoint")
# Ten sequences a step do not divide by four ranks, 301 tokens and 33 widths not either; the largest logits are clipped
# over all ranks; several micro-steps, gradients added up in the last one.
STEPS = [
    "precision=fp32", "train.steps=50", "train.eval_every=10", "train.save_every=10", "train.tokens_per_step=320",
    "train.micro_batch=2", "train.log_every=1", "train.attention_every=7", "train.keep=100", "model.d_mlp=66",
    "tokenizer=bpe", "tokenizer.vocab_size=301", "attention=qk_clip", "attention.qk_clip=0.5", "model.qk_norm=false",
    "model.value_residual=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def words(place: Path, notes: Path):
    """The command line of the run `name`, with more words."""
    return lambda name, *more: tiny_words(place, notes, *STEPS, f"name={name}", *more)


@pytest.fixture(scope="module")
def alone(place: Path, words) -> Path:
    """The run on one process, that all others must equal."""
    command = [os.sys.executable, str(Path(__file__).parents[2] / "train.py"), *words("alone")]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    return place / "runs" / "alone"


def finished(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=200)
    return process.returncode, out


def assert_same_run(run: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    ours, theirs = read_lines(run / "metrics.jsonl"), read_lines(other / "metrics.jsonl")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            if not any(word in key for word in TIMINGS):
                if isinstance(value, (int, float, list)):
                    close = pytest.approx(np.array(its[key], dtype=float), rel=tolerance, abs=tolerance, nan_ok=True)
                    assert np.array(value, dtype=float) == close, (mine["step"], key)
                else:
                    assert value == its[key], (mine["step"], key)
    texts = [
        [(sample["step"], sample["text"]) for sample in read_lines(path / "samples.jsonl")] for path in (run, other)
    ]
    assert texts[0] == texts[1]
    ends = [newest_whole(folder).model_tensors() for folder in (run, other)]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, ["parallel=ddp"], marks=pytest.mark.slow),
        (2, ["parallel=fsdp"]),
        pytest.param(4, ["parallel=ddp"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel=fsdp"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel=hsdp", "parallel.shard_ranks=2"], marks=pytest.mark.slow),
        pytest.param(3, ["parallel=fsdp", "train.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=fsdp_offload"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=fsdp", "compile=on"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=ddp", "compile=on"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=ddp", "compile=blocks"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(word.split("=")[-1] for word in value),
)
def test_the_same_run_on_any_number_of_ranks(ranks: int, more: list[str], alone: Path, place: Path, words) -> None:
    """Every figure of every record, the samples and the weights agree over fifty steps."""
    name = "-".join([str(ranks), *(word.split("=")[-1] for word in more)])
    code, out = finished(torchrun(ranks, words(name, *more)))
    assert code == 0, out
    assert_same_run(place / "runs" / name, alone)


def until(condition, process: subprocess.Popen, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition(), process.communicate(timeout=60)[0]


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The process numbers of torchrun's ranks, in their order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    found = {int(v[5:]): int(pid) for pid, words in environments.items() for v in words if v.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def saved_beyond(run: Path, step: int):
    """A condition: the run has a checkpoint beyond this step."""
    return lambda: any(int(path.name[5:]) > step for path in checkpoints_of(run))


LONG = ["train.steps=100000", "train.save_every=2"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(alone: Path, place: Path, words) -> None:
    """Two ranks, then one, then four, each stopped by SIGTERM at one of them but the last: the run as if undisturbed."""
    run = place / "runs" / "moved"
    for ranks, more in ((2, ["parallel=fsdp"]), (1, []), (4, ["parallel=fsdp"])):
        before = newest_whole(run).step if run.exists() else 0
        process = torchrun(ranks, words("moved", "resume=auto", "train.save_every=3", *more))
        if ranks < 4:
            until(saved_beyond(run, before + 5), process)
            os.kill(ranks_of(process)[-1], signal.SIGTERM)
        code, out = finished(process)
        assert (code == 0) == (ranks == 4), out
        if ranks < 4:
            assert f"interrupted at step {newest_whole(run).step}" in out
    assert_same_run(run, alone)


@pytest.mark.slow
def test_more_ranks_than_a_step_has_sequences(place: Path, words) -> None:
    """Three sequences on four ranks: one has none, and takes part all the same."""
    few = ["train.tokens_per_step=96", "train.steps=5"]
    for name, ranks, parallel in (("few-1", 1, "ddp"), ("few-4", 4, "fsdp")):
        code, out = finished(torchrun(ranks, words(name, *few, f"parallel={parallel}")))
        assert code == 0, out
    assert_same_run(place / "runs" / "few-4", place / "runs" / "few-1")


def test_sigterm_on_one_rank_saves_once_and_ends_all(place: Path, words) -> None:
    """Also where torchrun would start them again: who sends SIGTERM does not mean another start."""
    run = place / "runs" / "preempted"
    process = torchrun(2, words("preempted", *LONG, "parallel=fsdp"), restarts=3)
    until(saved_beyond(run, 0), process)
    rank = ranks_of(process)[1]
    for _ in range(2):  # as where a cluster sends one to all and torchrun hands its own on
        os.kill(rank, signal.SIGTERM)
        time.sleep(0.05)
    code, out = finished(process)
    last = newest_whole(run)
    assert code == 1 and out.count("interrupted at step") == 1 and f"interrupted at step {last.step} " in out, out
    assert "exitcode  : 143" in out and out.count("run: ") == 1 and "trainer.py" not in out
    assert read_lines(run / "metrics.jsonl")[-1]["step"] == last.step and last.is_sharded


@pytest.mark.slow
@pytest.mark.parametrize("doomed", [0, 1])
def test_a_killed_rank_comes_back_and_the_run_ends_as_if_undisturbed(
    doomed: int, alone: Path, place: Path, words
) -> None:
    run = place / "runs" / f"killed-{doomed}"
    process = torchrun(2, words(run.name, "resume=auto", "parallel=fsdp", "train.save_every=5"), restarts=3)
    until(saved_beyond(run, 8), process)
    os.kill(ranks_of(process)[doomed], signal.SIGKILL)
    code, out = finished(process)
    assert code == 0 and "resuming" in out, out
    assert ("error: another rank is gone" in out) == (doomed == 1), out
    assert_same_run(run, alone)
    assert not newest_whole(run).is_sharded  # at its end a run is in the single-folder format


@pytest.mark.slow
@pytest.mark.parametrize(("doomed", "parallel"), [(0, "ddp"), (1, "fsdp")])
def test_a_rank_that_stands_still_is_named_with_its_step(doomed: int, parallel: str, place: Path, words) -> None:
    run = place / "runs" / f"stopped-{doomed}"
    process = torchrun(2, words(run.name, *LONG, f"parallel={parallel}", "parallel.watchdog_minutes=0.1"))
    until(saved_beyond(run, 0), process)
    stopped = ranks_of(process)[doomed]
    os.kill(stopped, signal.SIGSTOP)
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "does not answer" in line:
            break
    os.kill(stopped, signal.SIGKILL)  # torchrun itself would wait half a minute for it
    assert f"rank {doomed} does not answer, last seen in step" in lines[-1], "".join(lines)
    assert lines[-1].startswith("error: step ")
    assert finished(process)[0] == 1


@pytest.mark.slow
def test_what_a_restart_cannot_cure_is_not_tried_again(place: Path, words, capfd) -> None:
    """Exit codes 2 (before and after the ranks have met), 3 and 4, each said once by one rank, and once alone."""
    wild = ["optimizer=adamw", "optimizer.clip_norm=null", "optimizer.warmup_steps=0", "optimizer.learning_rate=1"]
    cases = {
        2: ["model.n_head=5"],
        -2: ["init_from=absent"],
        3: [*wild, "optimizer.learning_rate=1e30", "attention=scaled_dot", "train.eval_every=50"],
        4: [*wild, "health.on_failure=stop", "attention=scaled_dot", "train.eval_every=12"],
    }
    for code, more in cases.items():
        ended, out = finished(torchrun(2, words(f"verdict{code}", "parallel=fsdp", *more), restarts=2))
        assert ended == 1 and f"exitcode  : {abs(code)} " in out, out
        assert out.count("error: ") == 1 and out.count("run: ") <= 1, out


@pytest.mark.slow
def test_ranks_killed_while_files_are_written_leave_the_checkpoint_before(place: Path, words, alone: Path) -> None:
    """All ranks die inside an asynchronous save: what was saved is whole, and the run goes on from it."""
    run = place / "runs" / "torn"
    command = words("torn", "resume=auto", "parallel=fsdp", "train.save_every=1")
    process = torchrun(2, command)
    until(saved_beyond(run, 3), process)
    until(lambda: any((run / "checkpoints").glob(".writing-*/shards")), process)
    for rank in ranks_of(process):
        os.kill(rank, signal.SIGKILL)
    assert finished(process)[0] == 1
    left = checkpoints_of(run)
    assert left and all(read_checkpoint(path).is_sharded for path in left)
    code, out = finished(torchrun(2, command))
    assert code == 0 and f"resuming {left[-1]}" in out, out
    assert_same_run(run, alone)
    assert not list((run / "checkpoints").glob(".writing-*"))
    assert not [path for path in run.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".metadata")]
    assert not list(run.rglob(".metadata"))


def test_a_full_disk_ends_all_ranks_in_one_line_and_what_was_whole_is_whole(
    tmp_path: Path, notes: Path, place: Path
) -> None:
    """Exit code 5 on the rank whose disk refused, from within the thread that writes."""
    small = tmp_path / "small"
    small.mkdir()
    words = tiny_words(place, notes, *STEPS, "name=full", f"runs_dir={small}", "parallel=fsdp", "train.save_every=1")
    torchrun_words = [os.sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun_words, str(Path(__file__).parents[2] / "train.py"), *words]
    tried = with_own_mounts('mount -t tmpfs -o size=3m none "$0"', small, command, after='cp -r "$0" "$0-copy"')
    out = tried.stdout + tried.stderr
    assert tried.returncode == 1 and "exitcode  : 5 " in out and "No space left on device" in out, out
    assert (
        "Traceback"
        not in out.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0].partition(
            "error: "
        )[0]
    )
    saved = checkpoints_of(tmp_path / "small-copy" / "full")
    assert saved and all(read_checkpoint(path).is_sharded for path in saved)
