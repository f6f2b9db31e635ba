"""bf16_residual=true: in training, what the blocks add to is kept in bf16, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from andrea.checkpoint import checkpoints_of
from andrea.config import AttentionConfig, UserError, group_config
from andrea.model import GPT, initialise

WORDS = ["precision=bf16", "bf16_residual=true"]


def seen_by_blocks(model: GPT, precision: torch.dtype | None) -> set[torch.dtype]:
    """The types of what goes into and comes out of the blocks."""
    seen: set[torch.dtype] = set()
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, outputs: seen.update((inputs[0].dtype, outputs[0].dtype)))
    with torch.autocast("cpu", precision, enabled=precision is not None):
        model(torch.arange(6)[None])
    return seen


@pytest.mark.parametrize("name", ["andrea-nano", "gpt2"])
def test_blocks_add_to_bf16_under_autocast_alone(name: str) -> None:
    for is_bf16, precision, expected in (
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.bfloat16, torch.float32),
        (True, None, torch.float32),
    ):
        config = group_config("model", name, d_model=32, n_head=2, n_layer=2, d_mlp=64)
        model = GPT(config, AttentionConfig("scaled_dot", "auto"), 37)
        initialise(model, torch.Generator().manual_seed(0))
        model.has_bf16_residual = is_bf16
        assert seen_by_blocks(model, precision) == {expected}


def test_other_precisions_are_refused(tiny_run) -> None:
    with pytest.raises(
        UserError, match="bf16_residual=true needs precision=bf16, got precision=fp32; use precision=bf16"
    ):
        tiny_run("name=refused", "precision=fp32", "bf16_residual=true")


def test_a_run_learns_resumes_and_its_checkpoint_is_any_models(tiny_run, tmp_path: Path, capsys) -> None:
    assert tiny_run("name=plain", "precision=bf16") == 0
    assert tiny_run("name=half", *WORDS) == 0
    assert "bf16_residual: the sum that each block adds to is kept in bf16" in capsys.readouterr().out
    plain, half = (losses(tmp_path / "runs" / name) for name in ("plain", "half"))
    assert plain != half and half[-1] == pytest.approx(plain[-1], rel=0.02)
    weights = checkpoints_of(tmp_path / "runs" / "half")[-1]
    assert tiny_run("name=other", f"init_from={weights}", "precision=fp32", "train.steps=2") == 0


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]
