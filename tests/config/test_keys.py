"""Keys under the names of other programs, and under the old names that saved configurations have."""

from __future__ import annotations

from pathlib import Path

import pytest

from andrea.__main__ import main
from andrea.cli.command_line import configure
from andrea.config import (
    HealthConfig,
    LensConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    UserError,
    parse,
    to_plain,
    with_current_keys,
)
from andrea.config.keys import OTHER_NAMES, REMOVED, RENAMED, dotted_keys, suggestion
from andrea.training.resume import merge


def old_values() -> dict:
    """A run's configuration as a version from before the renaming saved it."""
    values = to_plain(configure(RunConfig, "train", ["health.failing_share=0.25"]))
    values["health"]["showing"] = values["health"].pop("failing_share")
    return values


def test_new_names_exist_and_old_ones_do_not() -> None:
    for kind, names in RENAMED.items():
        for old, new in names.items():
            assert new in kind.__dataclass_fields__ and old not in kind.__dataclass_fields__


def test_a_saved_configuration_with_old_keys_is_read_without_a_word(capsys: pytest.CaptureFixture) -> None:
    config = parse(RunConfig, old_values())
    assert config.health.failing_share == 0.25
    assert parse(HealthConfig, old_values()["health"]) == config.health
    assert capsys.readouterr() == ("", "")


def test_a_resumed_run_keeps_what_it_saved_under_an_old_key() -> None:
    composed = to_plain(configure(RunConfig, "train", []))
    merged, changes = merge(old_values(), composed, {}, {})
    assert (parse(RunConfig, merged).health.failing_share, changes) == (0.25, [])
    composed["health"]["failing_share"] = "0.75"
    merged, changes = merge(old_values(), composed, {}, {"health.failing_share": "0.75"})
    assert changes == ["health.failing_share: 0.25 → 0.75"]


def test_values_that_are_no_groups_stay_as_they_are() -> None:
    hostile = {"health": 3, "model": None, 7: {"showing": 1}}
    assert with_current_keys(RunConfig, hostile) == hostile


def test_import_is_typed_with_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json cannot be read"):
        main(["import", f"from={tmp_path}", f"out={tmp_path / 'out'}"])


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_names_of_other_programs_lead_to_keys_and_are_no_keys(kind: type) -> None:
    keys = dotted_keys(kind)
    for key, names in OTHER_NAMES[kind].items():
        assert key in keys
        for name in names.split():
            assert name not in keys and key in suggestion(kind, name), name


@pytest.mark.parametrize(
    ("kind", "typed", "meant"),
    [
        (RunConfig, "optimizer.lr", "optimizer.learning_rate or optimizer.matrix_learning_rate"),
        (RunConfig, "train.learning_rate", "optimizer.learning_rate or optimizer.matrix_learning_rate"),
        (RunConfig, "--learning-rate", "optimizer.learning_rate or optimizer.matrix_learning_rate"),
        (RunConfig, "--lr", "optimizer.learning_rate or optimizer.matrix_learning_rate"),
        (RunConfig, "batch_size", "train.tokens_per_step or train.micro_batch"),
        (RunConfig, "train.global_batch_size", "train.tokens_per_step"),
        (RunConfig, "eval.interval", "train.eval_every"),
        (RunConfig, "n_layer", "model.n_layer"),
        (RunConfig, "path", "data.path or tokenizer.path"),
        (RunConfig, "train.setps", "train.steps"),
        (SampleConfig, "--prompt", "prompt"),
        (RunConfig, "finetune", "init_from"),
        (RunConfig, "minutes", "train.max_minutes"),
        (SampleConfig, "model", "checkpoint"),
        (SampleConfig, "greedy", "temperature"),
        (LensConfig, "--prompt", "prompt"),
    ],
)
def test_the_key_that_a_user_of_another_program_means_is_suggested(kind: type, typed: str, meant: str) -> None:
    assert suggestion(kind, typed) == f"; did you mean {meant}?"


def test_suggestions_keep_to_what_is_allowed() -> None:
    assert suggestion(SampleConfig, "model", ["temperature", "seed"]) == ""
    assert suggestion(SampleConfig, "temp", ["temperature", "seed"]) == "; did you mean temperature?"


def test_a_removed_key_is_left_out_of_a_saved_configuration_where_it_changed_nothing() -> None:
    values = to_plain(configure(RunConfig, "train", []))
    removed = REMOVED[OptimizerConfig]
    assert removed.keys().isdisjoint(values["optimizer"])
    old = {**values, "optimizer": values["optimizer"] | removed}
    assert parse(RunConfig, old) == parse(RunConfig, values)
    assert merge(old, values, {}, {}) == (values, [])
    for key in removed:
        with pytest.raises(UserError, match=f"unknown key optimizer.{key}"):
            parse(RunConfig, {**values, "optimizer": values["optimizer"] | {key: "another"}})
