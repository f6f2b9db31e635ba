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
from conftest import tiny_words, torchrun

from andrea.checkpoint import checkpoints_of, newest_whole, read_checkpoint
from andrea.training.loggers import read_lines

# fp32 sums over ranks are made in another order, which moves their last bits (2^-24 = 6e-8); over fifty steps Muon's
# orthogonalisation in fp32 lets that grow to a few units more. In bf16 it would grow by orders of magnitude.
TOLERANCE = 1e-5
TIMINGS = ("seconds", "tokens_per_second", "memory", "checkpoint")
# Ten sequences a step do not divide by four ranks, 301 tokens and 33 widths not either; the largest logits are clipped
# over all ranks; several micro-steps, gradients added up in the last one.
STEPS = [
    "precision=fp32", "train.steps=50", "train.eval_every=10", "train.save_every=10", "train.tokens_per_step=320",
    "train.micro_batch=2", "train.log_every=1", "train.attention_every=10", "train.keep=100", "model.d_mlp=66",
    "tokenizer=bpe", "tokenizer.vocab_size=301", "attention=qk_clip", "attention.qk_clip=0.5", "model.qk_norm=false",
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
    command = [os.sys.executable, str(Path(__file__).parent.parent / "train.py"), *words("alone")]
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
    texts = [[(sample["step"], sample["text"]) for sample in read_lines(path / "samples.jsonl")] for path in (run, other)]
    assert texts[0] == texts[1]
    ends = [newest_whole(folder).model_tensors() for folder in (run, other)]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["parallel=ddp"]),
        (2, ["parallel=fsdp"]),
        pytest.param(4, ["parallel=ddp"], marks=pytest.mark.slow),
        (4, ["parallel=fsdp"]),
        pytest.param(4, ["parallel=hsdp", "parallel.shard_ranks=2"], marks=pytest.mark.slow),
        pytest.param(3, ["parallel=fsdp", "train.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=fsdp_offload"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=fsdp", "compile=on"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel=ddp", "compile=on"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(word.split("=")[-1] for word in value),
)
def test_the_same_run_on_any_number_of_ranks(ranks: int, more: list[str], alone: Path, place: Path, words) -> None:
    """Every figure of every record, the samples and the weights agree over fifty steps."""
    name = "-".join([str(ranks), *(word.split("=")[-1] for word in more)])
    code, out = finished(torchrun(ranks, words(name, *more)))
    assert code == 0, out
    assert_same_run(place / "runs" / name, alone)
