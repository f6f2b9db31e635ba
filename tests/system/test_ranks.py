"""A run on several ranks, real processes that torchrun starts, gives the results of one process, also after failures."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, ranks_of, tiny_words, torchrun, torchrun_command, with_own_mounts

from andrea.checkpoint import checkpoints_of, newest_whole, read_checkpoint
from andrea.training.records.run_folder import read_lines

# Sums over ranks add in another order, which changes the last bits in fp32 (2^-24 = 6e-8). Over fifty steps Muon's
# orthogonalisation amplifies the difference to a few units more in fp32; in bf16, by orders of magnitude.
TOLERANCE = 1e-5
WRITTEN = {"_score": 1.1e-3, "in_context_nats": 1.1e-4}  # with so few digits that the last may differ by one
TIMINGS = ("seconds", "tokens_per_second", "memory", "checkpoint")
# Four ranks divide neither the ten sequences of a step, nor the 301 tokens of the vocabulary, nor the MLP's 66 rows. The
# largest logits over all ranks are clipped. A step has several micro-batches; gradients are summed in the last one.
STEPS = [
    "precision=fp32", "train.steps=50", "train.eval_every=10", "train.save_every=10", "train.tokens_per_step=320",
    "train.micro_batch=2", "train.log_every=1", "train.keep=100", "model.d_mlp=66",
    "tokenizer=bpe", "tokenizer.vocab_size=301", "attention=qk_clip", "attention.qk_clip=0.5", "model.qk_norm=false",
    "model.value_residual=true", "model.dropout=0.1", "attention.gate=scalar",
    "attention.exclusive=learned", "model.value_embedding=table", "model.bigram_rows=64",
    "optimizer.muon_rows=equal", "optimizer.average_half_life=5",
    "attention.sink=true", "attention.window=[8, null]", "model.position=alibi",
]  # fmt: skip
SHORT = ["train.steps=10", "train.eval_every=5", "train.save_every=5"]
SHORT += ["attention.qk_clip=null", "attention.score_softcap=2"]  # one excludes the other
# The first gradient of a row of a table moves each of its elements by a whole learning rate, in Adam, however small it is.
# Element (123, 25) of one table got 2e-8 at step 17, a thousandth of its later gradients: its sum nearly cancels, so the last
# bits decide the sign, and the element keeps a difference of 5e-4 from there on. All others differ by 1e-4 at most.
TABLES_OFF = 2e-4  # share of a table's elements that may differ by more than rounding


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs and of their data."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def words(place: Path, notes: Path):
    """A function: the command line of the run `name`, with more words."""
    return lambda name, *more: tiny_words(place, notes, *STEPS, f"name={name}", *more)


@pytest.fixture(scope="module")
def alone(place: Path, words) -> Path:
    """The run of one process, which all others must equal."""
    command = [os.sys.executable, str(ROOT / "train.py"), *words("alone")]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    return place / "runs" / "alone"


def finished(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=200)
    return process.returncode, out


def assert_same_run(run: Path, other: Path) -> None:
    ours, theirs = read_lines(run / "metrics.jsonl"), read_lines(other / "metrics.jsonl")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            if not any(word in key for word in TIMINGS):
                if isinstance(value, (int, float, list)):
                    most = next((written for name, written in WRITTEN.items() if name in key), TOLERANCE)
                    close = pytest.approx(np.array(its[key], dtype=float), rel=TOLERANCE, abs=most, nan_ok=True)
                    assert np.array(value, dtype=float) == close, (mine["step"], key)
                else:
                    assert value == its[key], (mine["step"], key)
    texts = [
        [(sample["step"], sample["text"]) for sample in read_lines(path / "samples.jsonl")] for path in (run, other)
    ]
    assert texts[0] == texts[1]
    ends = [newest_whole(folder).model_tensors() for folder in (run, other)]
    for name, tensor in ends[0].items():
        off = ~torch.isclose(tensor, ends[1][name], rtol=1e-3, atol=1e-4)
        assert off.float().mean() <= (TABLES_OFF if "value_embedding.table" in name else 0.0), (name, off.sum())
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-2, atol=1e-3)


def test_two_ranks_give_the_same_short_run(place: Path, words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps with a teacher, two evaluations, two saves: the one test of real ranks that is not slow."""
    monkeypatch.syspath_prepend(str(ROOT))
    train = importlib.import_module("train").main  # in this process: torch is loaded
    # A teacher as untrained as the run would leave gradients that nearly cancel; their last bits would decide Adam's steps.
    assert train(words("teacher", "train.steps=20", "seed=1")) == 0
    taught = [*SHORT, "train.teachers=teacher"]
    code, out = finished(torchrun(2, words("short-2", *taught, "parallel=fsdp")))
    assert code == 0 and "UserWarning" not in out, out
    assert train(words("short-1", *taught)) == 0
    assert_same_run(place / "runs" / "short-2", place / "runs" / "short-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(4, ["parallel=ddp"], marks=pytest.mark.long),
        pytest.param(4, ["parallel=fsdp"], marks=pytest.mark.long),
        pytest.param(3, ["parallel=fsdp", "train.activation_checkpointing=true"], marks=pytest.mark.long),
        (2, ["parallel=fsdp_offload"]),
        pytest.param(2, ["parallel=fsdp", "compile=on"], marks=pytest.mark.long),
        pytest.param(2, ["parallel=ddp", "compile=on"], marks=pytest.mark.long),
        pytest.param(2, ["parallel=ddp", "compile=blocks"], marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(word.split("=")[-1] for word in value),
)
def test_the_same_run_on_any_number_of_ranks(ranks: int, more: list[str], alone: Path, place: Path, words) -> None:
    """Over fifty steps every figure of every record agrees; so do the samples and the weights."""
    name = "-".join([str(ranks), *(word.split("=")[-1] for word in more)])
    code, out = finished(torchrun(ranks, words(name, *more)))
    assert code == 0, out
    assert_same_run(place / "runs" / name, alone)


def wait_until(condition, process: subprocess.Popen, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition(), process.communicate(timeout=60)[0]


def has_saved_after(run: Path, step: int) -> Callable[[], bool]:
    """A condition: the run has a checkpoint of a later step."""
    return lambda: any(int(path.name[5:]) > step for path in checkpoints_of(run))


LONG = ["train.steps=100000", "train.save_every=2"]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_ranks(alone: Path, place: Path, words) -> None:
    """Two ranks, then one, both stopped by SIGTERM to one rank, then four: equal to the uninterrupted run."""
    run = place / "runs" / "moved"
    for ranks, more in ((2, ["parallel=fsdp"]), (1, []), (4, ["parallel=fsdp"])):
        before = newest_whole(run).step if run.exists() else 0
        process = torchrun(ranks, words("moved", "resume=auto", "train.save_every=3", *more))
        if ranks < 4:
            wait_until(has_saved_after(run, before + 5), process)
            os.kill(ranks_of(process)[-1], signal.SIGTERM)
        code, out = finished(process)
        assert (code == 0) == (ranks == 4), out
        if ranks < 4:
            assert f"interrupted at step {newest_whole(run).step}" in out
    assert_same_run(run, alone)


@pytest.mark.slow
def test_more_ranks_than_a_step_has_sequences(place: Path, words) -> None:
    """Three sequences on four ranks: one rank has no sequence, and still joins every collective."""
    few = ["train.tokens_per_step=96", "train.steps=5"]
    for name, ranks, parallel in (("few-1", 1, "ddp"), ("few-4", 4, "fsdp")):
        code, out = finished(torchrun(ranks, words(name, *few, f"parallel={parallel}")))
        assert code == 0, out
    assert_same_run(place / "runs" / "few-4", place / "runs" / "few-1")


@pytest.mark.slow
def test_sigterm_on_one_rank_saves_once_and_ends_all(place: Path, words) -> None:
    """Also with restarts left: SIGTERM asks the run to end, so torchrun must not start it again."""
    run = place / "runs" / "preempted"
    process = torchrun(2, words("preempted", *LONG, "parallel=fsdp"), restarts=3)
    wait_until(has_saved_after(run, 0), process)
    rank = ranks_of(process)[1]
    for _ in range(2):  # a cluster sends it to every process, and torchrun forwards its own to the ranks
        os.kill(rank, signal.SIGTERM)
        time.sleep(0.05)
    code, out = finished(process)
    last = newest_whole(run)
    assert code == 1 and out.count("interrupted at step") == 1 and f"interrupted at step {last.step} " in out, out
    assert "exitcode  : 143" in out and out.count("run: ") == 1 and "trainer.py" not in out
    assert read_lines(run / "metrics.jsonl")[-1]["step"] == last.step and last.is_sharded


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("doomed", [0, 1])
def test_after_a_rank_was_killed_the_restarted_run_equals_the_uninterrupted_one(
    doomed: int, alone: Path, place: Path, words
) -> None:
    run = place / "runs" / f"killed-{doomed}"
    process = torchrun(2, words(run.name, "resume=auto", "parallel=fsdp", "train.save_every=5"), restarts=3)
    wait_until(has_saved_after(run, 8), process)
    os.kill(ranks_of(process)[doomed], signal.SIGKILL)
    code, out = finished(process)
    assert code == 0 and "resuming" in out, (
        out
    )  # torchrun may end the other rank before it notices that it lost its peer
    assert_same_run(run, alone)
    assert not newest_whole(run).is_sharded  # at its end a run is in the single-folder format


@pytest.mark.slow
def test_a_rank_whose_peer_was_killed_says_so_and_exits_with_code_6(place: Path, words) -> None:
    """The ranks run without torchrun, which may end the other rank before it notices that its peer is gone."""
    command = [os.sys.executable, str(ROOT / "train.py"), *words("peerless", *LONG, "parallel=ddp")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in ("0", "1"):
        place_of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=os.environ | address | place_of_rank, **streams))
    wait_until(has_saved_after(place / "runs" / "peerless", 0), processes[0])
    processes[1].kill()
    code, out = finished(processes[0])
    assert code == 6 and out.count("error: another rank was lost: ") == 1, out
    finished(processes[1])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("doomed", "parallel"), [(0, "ddp"), (1, "fsdp")])
def test_a_rank_that_is_stuck_is_named_with_its_step(doomed: int, parallel: str, place: Path, words) -> None:
    run = place / "runs" / f"stopped-{doomed}"
    process = torchrun(2, words(run.name, *LONG, f"parallel={parallel}", "parallel.watchdog_minutes=0.1"))
    wait_until(has_saved_after(run, 0), process)
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
def test_a_failure_that_a_restart_cannot_cure_ends_the_job(place: Path, words, capfd) -> None:
    """Exit codes 2 (before and after the process group exists), 3 and 4: one rank prints one line, and torchrun ends."""
    wild = [
        "optimizer=adamw",
        "optimizer.muon_rows=none",
        "optimizer.clip_norm=null",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1",
    ]
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
def test_ranks_killed_during_a_save_leave_the_previous_checkpoint_whole(place: Path, words, alone: Path) -> None:
    """All ranks die during an asynchronous save: earlier checkpoints are whole, and the run resumes from the newest."""
    run = place / "runs" / "torn"
    command = words("torn", "resume=auto", "parallel=fsdp", "train.save_every=1")
    process = torchrun(2, command)
    wait_until(has_saved_after(run, 3), process)
    wait_until(lambda: any((run / "checkpoints").glob(".writing-*/shards")), process)
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


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_in_one_line_and_earlier_checkpoints_are_whole(
    tmp_path: Path, notes: Path, place: Path
) -> None:
    """Exit code 5 on the rank whose write failed, in the thread that saves."""
    small = tmp_path / "small"
    small.mkdir()
    words = tiny_words(place, notes, *STEPS, "name=full", f"runs_dir={small}", "parallel=fsdp", "train.save_every=1")
    tried = with_own_mounts(
        'mount -t tmpfs -o size=3m none "$0"', small, torchrun_command(2, words), after='cp -r "$0" "$0-copy"'
    )
    out = tried.stdout + tried.stderr
    assert tried.returncode == 1 and "exitcode  : 5 " in out and "No space left on device" in out, out
    ours = out.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]  # then torchrun's own
    assert "Traceback" not in ours.partition("error: ")[0] and ours.count("No space left on device") == 1, out
    saved = checkpoints_of(tmp_path / "small-copy" / "full")
    assert saved and all(read_checkpoint(path).is_sharded for path in saved)


@pytest.mark.slow
def test_two_ranks_agree_on_a_length_by_time(place: Path, words) -> None:
    """Ranks that disagreed on the number of steps would wait for each other until the watchdog ends them."""
    by_time = ["train.max_minutes=0.6", "train.steps=100000", "train.eval_every=auto", "train.save_every=auto"]
    code, out = finished(torchrun(2, words("by-time", *by_time, "parallel=ddp")))
    assert code == 0, out
    last = read_lines(place / "runs" / "by-time" / "metrics.jsonl")[-1]
    planned = newest_whole(place / "runs" / "by-time").state["planned_steps"]
    # On a machine that is too busy to start in time, no length is fixed: the ranks agree to stop, and on what they evaluate.
    assert last["step"] <= planned and (planned < 100000 or last["event"] == "stopped"), out
