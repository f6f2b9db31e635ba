"""Keys under the names of other programs, and keys that have been removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andrea.__main__ import main
from andrea.api.command_line import configure
from andrea.config import (
    LensConfig,
    RunConfig,
    SampleConfig,
    UserError,
    parse,
    to_plain,
    with_current_keys,
)
from andrea.config.keys import ANY, COMMANDS, OTHER_NAMES, REMOVED, dotted_keys, key_types, suggestion
from andrea.training.resume import merge


def only_value(only: Any) -> Any:
    return 7 if only is ANY else only["muon"] if isinstance(only, dict) else only


def old_values() -> dict:
    """A run's configuration as it was saved with the keys that have been removed since."""
    values = to_plain(configure(RunConfig, "train", ["train.keep=2"]))
    for kind, removed in REMOVED.items():
        group = next((name for name, hint in key_types(RunConfig).items() if hint is kind), None)
        (values[group] if group else values).update({key: only_value(only) for key, only in removed.items()})
    return values


def test_a_removed_key_is_no_key() -> None:
    for kind, removed in REMOVED.items():
        assert not set(removed) & set(kind.__dataclass_fields__)


def test_a_saved_configuration_with_removed_keys_is_read_without_a_word(capsys: pytest.CaptureFixture) -> None:
    composed = to_plain(configure(RunConfig, "train", []))
    merged, changes = merge(old_values(), composed, {}, {})
    assert (parse(RunConfig, merged).train.keep, changes) == (2, [])
    assert parse(RunConfig, old_values()).train.keep == 2
    assert capsys.readouterr() == ("", "")


def test_a_removed_key_that_changed_something_is_refused() -> None:
    values = old_values()
    values["optimizer"]["beta1"] = 0.5
    with pytest.raises(UserError, match="unknown key optimizer.beta1"):
        parse(RunConfig, values)


def test_values_that_are_no_groups_stay_as_they_are() -> None:
    hostile = {"health": 3, "model": None, 7: {"leak_nats": 1}}
    assert with_current_keys(RunConfig, hostile) == hostile


def test_import_is_typed_with_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json cannot be read"):
        main(["import", f"from={tmp_path}", f"out={tmp_path / 'out'}"])


@pytest.mark.parametrize("kind", COMMANDS.values())
def test_names_of_other_programs_lead_to_keys_and_are_no_keys(kind: type) -> None:
    keys = dotted_keys(kind)
    for key, names in OTHER_NAMES.items():
        for name in names.split() if key in keys else ():
            assert name not in keys and key in suggestion(kind, name), name


def test_each_key_with_other_names_is_one_of_some_command() -> None:
    assert OTHER_NAMES.keys() <= {key for kind in COMMANDS.values() for key in dotted_keys(kind)}


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
