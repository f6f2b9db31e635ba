"""QK-clip: a head whose logits explode is scaled down; all other heads stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from andrea.attention import HeadStatistics
from andrea.checkpoint import newest_whole
from andrea.config import AttentionConfig, ModelConfig
from andrea.model import GPT, initialise
from andrea.training.optimizer import clip_logits
from andrea.training.parallel.ranks import Parallel
from andrea.training.records.run_folder import read_lines

T, THRESHOLD = 16, 20.0
FINITE = torch.tensor(True)


def made(n_kv_head: int | None = None, **changes) -> GPT:
    config = ModelConfig(
        name="tiny", d_model=48, n_layer=2, n_head=6, d_mlp=32, sequence_length=T, position="rotary", rotary_base=1e4,
        norm="rmsnorm", norm_epsilon=1e-6, mlp="gelu", bias=True, tied_head=False, qk_norm=False, logit_softcap=None,
        recipe_steps=1, recipe_tokens_per_step=T, n_kv_head=n_kv_head,
    )  # fmt: skip
    attention = AttentionConfig(compatibility="scaled_dot", implementation="reference")
    model = GPT(config, attention, 31)
    initialise(model, torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def explode(model: GPT, head: int) -> None:
    """Multiply the queries of one head of the second layer by 300, biases too."""
    query = model.blocks[1].attention.query
    query.bias.normal_()
    query.weight[8 * head : 8 * head + 8] *= 300
    query.bias[8 * head : 8 * head + 8] *= 300


@torch.no_grad()
def largest(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    _, layers = model(tokens, statistics=True)
    return HeadStatistics.of_layers(layers).largest_logit


@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_the_largest_logit_becomes_the_threshold_and_the_rest_stays(n_kv_head):
    torch.manual_seed(0)
    model, tokens = made(n_kv_head), torch.randint(31, (3, T))
    explode(model, head=4)
    before, weights = largest(model, tokens), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert before[1, 4] > 5 * THRESHOLD
    assert (before > THRESHOLD).sum() == 1
    clipped = clip_logits(Parallel(model), before, THRESHOLD, FINITE)
    after = largest(model, tokens)
    assert after[1, 4].item() == pytest.approx(THRESHOLD, rel=1e-4)
    group = [4] if n_kv_head is None else [3, 4, 5]  # heads that share a key are scaled together
    assert clipped.item() == len(group)
    for head in range(6):
        if head in group:
            assert after[1, head].item() == pytest.approx(
                before[1, head].item() * THRESHOLD / before[1, 4].item(), rel=1e-3
            )
        else:
            assert after[1, head] == before[1, head]
    rows = torch.zeros(48, dtype=torch.bool)
    rows[[8 * head + row for head in group for row in range(8)]] = True
    for name, tensor in model.state_dict().items():
        if name in ("blocks.1.attention.query.weight", "blocks.1.attention.query.bias"):
            factor = math.sqrt(THRESHOLD / before[1, 4].item())
            torch.testing.assert_close(tensor[rows], factor * weights[name][rows])
            assert torch.equal(tensor[~rows], weights[name][~rows])
        elif not name.startswith("blocks.1.attention.key"):
            assert torch.equal(tensor, weights[name]), name


def test_nothing_changes_below_the_threshold_or_where_the_step_was_not_finite():
    model, tokens = made(), torch.randint(31, (3, T))
    explode(model, head=2)
    logits, weights = largest(model, tokens), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert clip_logits(Parallel(model), logits, THRESHOLD, ~FINITE) == 0
    assert clip_logits(Parallel(model), logits, 2 * logits.max().item(), FINITE) == 0
    assert clip_logits(Parallel(model), torch.full((2, 6), -math.inf), THRESHOLD, FINITE) == 0
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.fixture
def trained(tiny_run, short_text: Path, tmp_path: Path) -> Callable[..., list[dict]]:
    """Trains at a rate that drives the logits up, without QK-norm; returns the records of the run `name`."""
    hot = ("model.qk_norm=false", "optimizer=adamw", "optimizer.learning_rate=0.5", "optimizer.weight_decay=0",
           "optimizer.tuned_d_model=null", "optimizer.tuned_n_layer=null", "train.micro_batch=3", "precision=fp32",
           "train.log_every=1", f"data.path={short_text}", "train.sample_tokens=0",
           *(f"train.{what}_every=1000" for what in ("eval", "save")))  # fmt: skip

    def train(name: str, *words: str) -> list[dict]:
        assert tiny_run(f"name={name}", *hot, *words) == 0
        return read_lines(tmp_path / "runs" / name / "metrics.jsonl")

    return train


@pytest.mark.parametrize("implementation", ["auto", pytest.param("triton", marks=pytest.mark.untraced)])
def test_the_logits_of_an_exploding_run_stay_bounded(implementation: str, trained) -> None:
    small = ("train.steps=6", "train.tokens_per_step=64", "model.n_layer=1", "model.n_head=1")
    size = small if implementation == "triton" else ("train.steps=20",)  # interpreted, a token takes milliseconds
    free = trained("free", "attention.qk_clip=1e6", *size)
    with_clip = trained("clipped", "attention.qk_clip=3", f"attention.implementation={implementation}", *size)
    name = "attention/step/largest_logit"
    logits = {
        run: [record[name] for record in records if name in record]
        for run, records in (("free", free), ("clipped", with_clip))
    }
    assert max(logits["free"]) > 20
    # A step may overshoot before it is clipped, but one overshoot must not build on another.
    assert max(logits["clipped"]) < max(logits["free"]) / 2
    clipped = [
        record["attention/step/clipped_heads"] for record in with_clip if "attention/step/clipped_heads" in record
    ]
    assert sum(count > 0 for count in clipped) > 0
    assert not any(record.get("attention/step/clipped_heads") for record in free)
    losses = [record["train/loss"] for record in with_clip if "train/loss" in record]
    assert all(math.isfinite(loss) for loss in losses)


def test_the_largest_over_all_micro_batches_counts(trained, tmp_path: Path) -> None:
    """The same run in micro-batches of 1, 3 and 8 sequences clips the same heads by the same factors."""
    weights = []
    for size in (1, 3, 8):
        records = trained(f"by{size}", "attention.qk_clip=3", f"train.micro_batch={size}", "train.steps=5")
        assert any(record.get("attention/step/clipped_heads") for record in records)
        weights.append(newest_whole(tmp_path / "runs" / f"by{size}").model_tensors()["blocks.1.attention.query.weight"])
    # Five of AdamW's steps move a weight by up to 2.5; where its gradient is small, rounding is some 1e-4 of that.
    for other in weights[:2]:
        torch.testing.assert_close(other, weights[2], rtol=0, atol=2.5e-3)
