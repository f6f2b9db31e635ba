"""Runs with model.lora_rank: what they train, keep, resume and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import run_script, tiny_words, torchrun

from andrea.__main__ import main
from andrea.checkpoint import Checkpoint, newest_whole
from andrea.checkpoint.model import load_model
from andrea.config import UserError
from andrea.model import GPT
from andrea.model.lora import is_factor, merged_weight

FAST = ["precision=fp32", "device=cpu", "train.steps=8", "train.sample_tokens=0"]


def newest(tmp_path: Path, name: str) -> Checkpoint:
    return newest_whole(tmp_path / "runs" / name)


def loaded(checkpoint: Checkpoint) -> GPT:
    return load_model(checkpoint, checkpoint.tokenizer())


@pytest.mark.parametrize("more", [[], ["optimizer=adamw", "optimizer.learning_rate=0.003"]], ids=["muon", "adamw"])
def test_the_weights_stay_and_the_factors_learn(
    more: list[str], trained: Path, tmp_path: Path, tiny_run, capsys
) -> None:
    words = [*FAST, f"init_from={trained}", "model.lora_rank=3", "train.sample_tokens=8", *more]
    assert tiny_run("name=tuned", *words) == 0
    out = capsys.readouterr().out
    n_factor = 2 * 3 * (4 * (32 + 32) + 3 * (32 + 64))
    assert (
        f"LoRA: {n_factor:,} of " in out and "by AdamW at optimizer.learning_rate=" in out and "sample at step 8" in out
    )
    base, tuned = newest_whole(trained).model_tensors(), newest(tmp_path, "tuned").model_tensors()
    assert all(torch.equal(weight, tuned[name]) for name, weight in base.items())
    factors = {name for name in tuned if is_factor(name)}
    assert tuned.keys() - base.keys() == factors and all(bool(tuned[name].any()) for name in factors)
    state = newest(tmp_path, "tuned").optimizer_tensors()
    assert {name.partition("/")[0] for name in state} == factors  # nothing is kept for what is frozen
    records = [json.loads(line) for line in (tmp_path / "runs" / "tuned" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["val/loss"] for record in records if "val/loss" in record]
    before = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < [record["val/loss"] for record in before if "val/loss" in record][-1]


def test_a_loaded_model_has_the_factors_in_its_weights(trained: Path, tmp_path: Path, tiny_run, capsys) -> None:
    assert tiny_run("name=tuned", *FAST, f"init_from={trained}", "model.lora_rank=3") == 0
    checkpoint = newest(tmp_path, "tuned")
    tensors, model = checkpoint.model_tensors(), loaded(checkpoint)
    place = "blocks.1.mlp.down"
    merged = merged_weight(*(tensors[f"{place}.{end}"] for end in ("weight", "lora_a", "lora_b")))
    assert model.config.lora_rank == 0 and torch.equal(model.blocks[1].mlp.down.weight, merged)
    assert not torch.equal(merged, tensors[f"{place}.weight"])
    where = [f"runs_dir={tmp_path / 'runs'}", "checkpoint=tuned"]
    assert run_script(main, ["sample", *where, "max_new_tokens=5", "device=cpu"], capsys)[0] == 0
    page = tmp_path / "lens.html"
    assert run_script(main, ["lens", *where, "prompt=def f", f"out={page}", "device=cpu"], capsys)[0] == 0


def test_a_run_from_tuned_weights_begins_with_the_merged_ones(trained: Path, tmp_path: Path, tiny_run, capsys) -> None:
    """Its rank is that which is typed; without one, all weights are trained."""
    assert tiny_run("name=tuned", *FAST, f"init_from={trained}", "model.lora_rank=3") == 0
    merged = loaded(newest(tmp_path, "tuned")).state_dict()
    assert tiny_run("name=again", *FAST, f"init_from={tmp_path / 'runs' / 'tuned'}", "model.lora_rank=5") == 0
    again = newest(tmp_path, "again").model_tensors()
    assert all(torch.equal(weight, again[name]) for name, weight in merged.items())
    assert again["blocks.0.attention.query.lora_a"].shape == (5, 32)
    capsys.readouterr()
    assert tiny_run("name=all", *FAST, f"init_from={tmp_path / 'runs' / 'tuned'}") == 0
    assert "LoRA" not in capsys.readouterr().out
    assert newest(tmp_path, "all").model_tensors().keys() == merged.keys()


@pytest.mark.parametrize(
    "more", [[], ["optimizer.average_half_life=3", "model.dropout=0.1"]], ids=["plain", "averaged"]
)
def test_a_resumed_run_equals_the_uninterrupted_one(more: list[str], trained: Path, tmp_path: Path, tiny_run) -> None:
    words = [*FAST, f"init_from={trained}", "model.lora_rank=3", "train.save_every=4", *more]
    assert tiny_run("name=whole", *words) == 0
    middle = tmp_path / "runs" / "whole" / "checkpoints" / "step-00000004"
    assert tiny_run("name=resumed", f"resume={middle}", *FAST) == 0
    whole, resumed = newest(tmp_path, "whole"), newest(tmp_path, "resumed")
    assert whole.step == resumed.step == 8
    for read in (Checkpoint.model_tensors, Checkpoint.optimizer_tensors):
        ours, theirs = read(whole), read(resumed)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "model.lora_rank=3 freezes .*init_from=…"),
        (["resume=auto", "name=none-yet"], "model.lora_rank=3 freezes .*init_from=…"),
        (["init_from=TRAINED", "model.mlp=my_parts.Mine"], r"no factors for model.mlp.*set model.lora_rank=0"),
        (["init_from=TRAINED", "attention.qk_clip=5", "model.qk_norm=false"], "attention.qk_clip=null"),
        (["init_from=TRAINED", "model.lora_rank=-1"], "model.lora_rank=-1 must be from 0"),
        (["init_from=TRAINED", "model.d_mlp=65"], r"model.d_mlp=65 \(init_from has 64\)"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], reason: str, trained: Path, tiny_run) -> None:
    words = [word.replace("TRAINED", str(trained)) for word in words]
    with pytest.raises(UserError, match=reason):
        tiny_run(*FAST, "model.lora_rank=3", *words)


def test_a_resumed_run_keeps_its_rank(trained: Path, tmp_path: Path, tiny_run) -> None:
    assert tiny_run("name=tuned", *FAST, f"init_from={trained}", "model.lora_rank=3") == 0
    with pytest.raises(UserError, match="model.lora_rank=4 cannot replace model.lora_rank=3"):
        tiny_run("name=tuned", "resume=auto", "model.lora_rank=4", "train.steps=12")


def test_a_dry_run_plans_with_less_memory(trained: Path, tiny_run, capsys) -> None:
    assert tiny_run(*FAST, f"init_from={trained}", "model.lora_rank=3", "dry_run=true") == 0
    assert "rank" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_ranks_give_the_run_of_one(parallel: str, trained: Path, tmp_path: Path, notes: Path, tiny_run) -> None:
    words = [*FAST, f"init_from={trained}", "model.lora_rank=3", "train.micro_batch=2"]
    assert tiny_run("name=one", *words) == 0
    process = torchrun(2, tiny_words(tmp_path, notes, "name=two", *words, f"parallel={parallel}"))
    out = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and f"parallel: {parallel} over 2 ranks" in out, out
    one, two = (newest(tmp_path, name) for name in ("one", "two"))
    for read in (Checkpoint.model_tensors, Checkpoint.optimizer_tensors):
        ours, theirs = read(one), read(two)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():  # sums over ranks add in another order
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5)
