"""The fingerprint of a recipe changes with what is learned, and with nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from andrea.api.command_line import configure
from andrea.config import RunConfig, recipe_fingerprint, recipe_values
from andrea.config.keys import NOT_LEARNED


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return configure(RunConfig, "train", [])


def changed(config: RunConfig, group: str, **values: Any) -> RunConfig:
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("model", {"d_mlp": 513}),
        ("model", {"value_residual": False}),
        ("attention", {"window": 7}),
        ("optimizer", {"weight_decay": 0.2}),
        ("tokenizer", {"vocab_size": 4095}),
        ("train", {"tokens_per_step": 8192}),
    ],
)
def test_it_changes_with_what_is_learned(config: RunConfig, group: str, values: dict[str, Any]) -> None:
    assert recipe_fingerprint(changed(config, group, **values)) != recipe_fingerprint(config)


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("model", {"name": "other", "recipe_steps": 3}),
        ("attention", {"implementation": "sdpa"}),
        ("train", {"tokens_per_step": 4096}),  # what auto stands for
        ("train", {"steps": 3, "micro_batch": 1, "eval_every": 2}),
        ("train", {"sample_tokens": 7}),
    ],
)
def test_it_stays_with_names_lengths_and_what_changes_the_speed(config, group: str, values: dict[str, Any]) -> None:
    assert recipe_fingerprint(changed(config, group, **values)) == recipe_fingerprint(config)
    assert recipe_fingerprint(dataclasses.replace(config, seed=3, threads=1)) == recipe_fingerprint(config)


def test_a_key_with_the_default_of_the_schema_does_not_count(config: RunConfig) -> None:
    """So a key that is added with a default of the old behaviour changes no fingerprint."""
    assert not {"attention.window", "attention.qk_clip", "model.n_kv_head"} & recipe_values(config).keys()
    assert recipe_values(config)["model.value_residual"] is True  # the schema's default is False


def test_every_key_of_a_run_counts_or_is_known_not_to() -> None:
    """A new group or key outside the groups must be put where it belongs: into the fingerprint, or into this list."""
    others = """name runs_dir data_dir seed device threads precision compile deterministic resume init_from dry_run data logger
        health parallel trust"""
    assert {field.name for field in dataclasses.fields(RunConfig)} == {*NOT_LEARNED, *others.split()}


def test_every_key_of_train_counts_or_is_known_not_to(config: RunConfig) -> None:
    """A key that only changes what is shown once counted: with another temperature a run had no expected curve."""
    learned = {"patience", "teachers"}
    assert {field.name for field in dataclasses.fields(config.train)} == {*NOT_LEARNED["train"].split(), *learned}


def test_the_keys_that_are_left_out_exist(config: RunConfig) -> None:
    for group, keys in NOT_LEARNED.items():
        assert set(keys.split()) <= {field.name for field in dataclasses.fields(getattr(config, group))}
