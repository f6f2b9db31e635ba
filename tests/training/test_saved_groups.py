"""A group that is typed again by its name keeps the run's values, also where its file has changed since."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from andrea.checkpoint import read_checkpoint
from andrea.config import CONFIGS, UserError
from andrea.config.keys import chosen_groups


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of configs/ that the program reads and a test may change."""
    copy = Path(shutil.copytree(CONFIGS, tmp_path / "configs"))
    for module in ("andrea.config.keys", "andrea.api.command_line"):
        monkeypatch.setattr(f"{module}.CONFIGS", copy)
    return copy


def change(path: Path, **values: object) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def resumed_config(tmp_path: Path) -> dict:
    return yaml.safe_load((tmp_path / "runs" / "a" / "config.yaml").read_text())


def test_the_choices_of_a_run_are_the_defaults_and_the_typed() -> None:
    assert chosen_groups({"data": "text"}) == {
        "model": "andrea-nano", "attention": "scaled_dot", "data": "text", "tokenizer": "bpe", "optimizer": "muon",
        "logger": "wandb", "health": "default", "parallel": "auto", "objective": "next_token",
    }  # fmt: skip


def test_a_run_of_a_changed_preset_goes_on_with_its_values(configs, tmp_path, tiny_run, capsys) -> None:
    recipe = ["model=andrea-nano", "optimizer=muon"]
    assert tiny_run("name=a", *recipe, "train.steps=4") == 0
    before = resumed_config(tmp_path)
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "step-00000004"
    assert read_checkpoint(checkpoint).state["groups"] == chosen_groups(
        {"data": "text", "tokenizer": "byte", "logger": "none"}
    )
    change(configs / "model" / "andrea-nano.yaml", value_residual=False, norm_epsilon=1e-5)
    change(configs / "optimizer" / "muon.yaml", weight_decay=0.2)
    capsys.readouterr()
    assert tiny_run("name=a", "resume=auto", *recipe, "train.steps=8", "optimizer.clip_norm=0.9") == 0
    said = capsys.readouterr().out
    assert "  changed optimizer.clip_norm: 1.0 → 0.9\n" in said and "weight_decay: " not in said
    after = resumed_config(tmp_path)
    assert after["model"] == before["model"] and after["optimizer"] == before["optimizer"] | {"clip_norm": 0.9}


def test_another_group_is_judged_as_before_and_becomes_the_run_s(configs, tmp_path, tiny_run, capsys) -> None:
    assert tiny_run("name=a", "train.steps=4") == 0
    change(configs / "attention" / "sliding_window.yaml", window=16)
    assert tiny_run("name=a", "resume=auto", "train.steps=6", "attention=sliding_window") == 0
    assert "  changed attention.window: null → 16\n" in capsys.readouterr().out
    change(configs / "attention" / "sliding_window.yaml", window=8)
    assert tiny_run("name=a", "resume=auto", "train.steps=8", "attention=sliding_window") == 0
    assert resumed_config(tmp_path)["attention"]["window"] == 16
    with pytest.raises(UserError, match=r"optimizer.kind=adamw cannot replace optimizer.kind=muon"):
        tiny_run("name=a", "resume=auto", "train.steps=10", "optimizer=adamw")
