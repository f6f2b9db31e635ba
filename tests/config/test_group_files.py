"""The YAML files of configs/: every key stands once with its comment, and every choice has a value for every key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing

import pytest
import yaml
from conftest import CONFIGS_OF_COMMANDS

from andrea.api.words import CommandLine, compose, configure
from andrea.cli.help import FIRST, help_text, read_commented
from andrea.config import (
    CONFIGS,
    RunConfig,
    UserError,
    group_config,
    group_values,
    parse,
    to_plain,
)
from andrea.config.group_files import choices
from andrea.config.keys import REMOVED, dotted_keys

pytestmark = pytest.mark.untraced

MOST_KEYS = 95  # of training
GROUPS = {group.name: group.value for group in read_commented("train").groups}
CHOICES = [(group, choice) for group in GROUPS for choice in choices(group)]
OLD = re.compile(r".*-\d{4}-\d{2}")  # choices of an earlier recipe: in full, and without the keys that came after them
KEYS_OF_9A97185 = {
    "model": "name d_model n_layer n_head d_mlp sequence_length position rotary_base norm norm_epsilon mlp bias "
    "tied_head qk_norm logit_softcap zero_init_projections recipe_steps recipe_tokens_per_step n_kv_head "
    "value_residual",
    "attention": "compatibility implementation window across_documents qk_clip",
    "optimizer": "kind tuned_d_model tuned_n_layer learning_rate embedding_learning_rate matrix_learning_rate beta1 "
    "beta2 epsilon momentum weight_decay clip_norm schedule warmup_steps decay_fraction final_fraction "
    "rewarm_steps",
    "train": "steps tokens_per_step micro_batch log_every eval_every eval_tokens save_every keep sample_every "
    "sample_tokens max_minutes attention_every tokens_per_parameter flops lens_prompt "
    "activation_checkpointing",
}
DIGESTS_OF_9A97185 = {
    "andrea-nano-2026-11": "a0ad89e1",
    "andrea-12m-2026-11": "9af9dd60",
    "andrea-120m-2026-11": "66631e54",
    "andrea-480m-2026-11": "58e9c14d",
    "andrea-2b-2026-11": "edba89c3",
}
# What a choice needs besides its name.
NEEDS = {
    ("tokenizer", "hf"): ["tokenizer.path=."],
    ("data", "text"): ["data.path=x"],
    ("data", "shards"): ["data.path=x"],
    ("data", "mixture"): ["data.sources={a: {kind: pystdlib}}"],
    ("attention", "additive"): ["model.position=learned"],
    ("attention", "qk_clip"): ["model.qk_norm=false"],
}


def fields_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_folder_is_a_group_with_a_default() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} == set(GROUPS)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_a_choice_gives_every_key_a_value_the_same_as_hydra_s(group: str, choice: str) -> None:
    values = group_values(group, choice)
    kind = typing.get_type_hints(RunConfig)[group]
    missing = fields_of(kind) - set(values)
    assert set(values) <= fields_of(kind) and (not missing or OLD.fullmatch(choice))
    assert not missing & {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    composed = compose("train", CommandLine({group: choice}, {}))[group]
    # YAML 1.1 reads 1e-6 as text, OmegaConf as a number; `parse` takes both.
    assert {key: as_number(value) for key, value in values.items()} == composed


def as_number(value: typing.Any) -> typing.Any:
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+e-\d+", value) else value


@pytest.mark.parametrize("choice", [choice for group, choice in CHOICES if group == "model" and OLD.fullmatch(choice)])
def test_an_old_model_chooses_its_recipe_and_inherits_nothing(choice: str) -> None:
    composed = compose("train", CommandLine({"model": choice}, {}))
    assert composed["optimizer"] == group_values("optimizer", "muon-2026-11")
    assert composed["attention"] == group_values("attention", "scaled_dot-2026-11")
    own = yaml.safe_load((CONFIGS / "model" / f"{choice}.yaml").read_text(encoding="utf-8"))
    assert [parent for parent in own["defaults"] if isinstance(parent, str)] == ["_self_"]
    typed = compose("train", CommandLine({"model": choice, "optimizer": "adamw"}, {"attention.window": 7}))
    assert typed["optimizer"]["kind"] == "adamw" and typed["attention"]["window"] == 7


def test_the_recipe_of_november_2026_has_the_values_of_its_last_commit() -> None:
    """Of 9a97185, by their digest: the names of the models apart, which now end in -2026-11."""
    digests = {}
    for choice in (choice for group, choice in CHOICES if group == "model" and OLD.fullmatch(choice)):
        configured = configure(RunConfig, "train", [f"model={choice}"])
        config = to_plain(configured)
        config["train"]["max_minutes"] = configured.max_minutes  # auto, which is null for these models
        removed = {group: REMOVED.get(typing.get_type_hints(RunConfig)[group], {}) for group in KEYS_OF_9A97185}
        removed["optimizer"] = {"rewarm_steps": 0} | removed["optimizer"]
        removed["optimizer"] = removed["optimizer"] | {"momentum": 0.95}  # that of Muon
        removed["train"] = removed["train"] | {"attention_every": "auto", "sample_every": "auto"}
        kept = {
            f"{group}.{key}": config[group].get(key, removed[group].get(key))
            for group, keys in KEYS_OF_9A97185.items()
            for key in keys.split()
            if key != "name"
        }
        digests[choice] = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    assert digests == DIGESTS_OF_9A97185


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_makes_a_valid_run(group: str, choice: str) -> None:
    config = configure(RunConfig, "train", [f"{group}={choice}", *NEEDS.get((group, choice), [])])
    if (group, choice) not in NEEDS:
        assert getattr(config, group) == group_config(group, choice)


@pytest.mark.parametrize("name", CONFIGS_OF_COMMANDS)
def test_a_command_s_file_holds_every_key_with_a_comment(name: str) -> None:
    file = read_commented(name)
    expected = set()
    for key, hint in typing.get_type_hints(CONFIGS_OF_COMMANDS[name]).items():
        if key not in GROUPS:
            expected |= {f"{key}.{inner}" for inner in fields_of(hint)} if dataclasses.is_dataclass(hint) else {key}
    assert {key.name for key in file.keys} == expected
    assert file.description and all(key.comment for key in [*file.keys, *file.groups])
    parse(CONFIGS_OF_COMMANDS[name], compose(name, CommandLine({}, {"runs": ["x"]} if name == "compare" else {})))


@pytest.mark.parametrize(("group", "default"), GROUPS.items())
def test_the_default_choice_explains_every_key_and_the_others_hold_only_what_differs(group: str, default: str) -> None:
    explained = read_commented(f"{group}/{default}")
    assert {key.name for key in explained.keys} == set(group_values(group, default))
    assert explained.description and all(key.comment for key in explained.keys)
    comments = {key.comment for key in explained.keys}
    for choice in [choice for choice in choices(group) if choice != default and not OLD.fullmatch(choice)]:
        own = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))
        parent, self = own["defaults"]
        assert parent in choices(group) and self == "_self_"
        file = read_commented(f"{group}/{choice}")
        assert file.description and not comments & {key.comment for key in file.keys}


def test_the_help_shows_the_keys_that_are_set_most_often() -> None:
    text = help_text("train", "usage", ["--help"])
    shown = re.findall(r"^  ([\w.]+)=", text.partition("\nKeys with their defaults:\n")[2], re.MULTILINE)
    assert shown == FIRST and len(text.splitlines()) < 45
    assert f"--help all lists all {len(leaves(RunConfig))} keys" in text


def leaves(kind: type) -> list[str]:
    """The dotted keys of a dataclass, without its groups."""
    keys = dotted_keys(kind)
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def test_a_run_has_few_keys() -> None:
    """A key exists because users set it; what nobody sets is a constant beside its use."""
    assert len(leaves(RunConfig)) <= MOST_KEYS


def test_the_whole_help_shows_every_key_as_it_is_typed() -> None:
    text = help_text("train", "usage", ["--help", "all"])
    assert text.startswith("usage\n")
    for group, default in GROUPS.items():
        assert re.search(rf"^  {group}={default} .*; one of: {', '.join(choices(group))}$", text, re.MULTILINE)
        for key in group_values(group, default):
            assert re.search(rf"^  {group}\.{key}=\S.*  \S", text, re.MULTILINE), key
    for key in read_commented("train").keys:
        assert f"\n  {key.name}={key.value} " in text and key.comment in text
    assert '\n  data.sample_prompt="def " ' in text


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_the_help_of_a_choice_shows_every_key_of_its_group_with_its_value_and_comment(group: str, choice: str) -> None:
    text = help_text("train", "usage", ["--help", f"{group}={choice}", "train.steps=3"])
    assert text.startswith(f"usage\n\n{group}={choice}: ") and "  train.steps=" not in text
    shown = dict(re.findall(rf"^  {group}\.(\w+)=(.*?)  +\S", text, re.MULTILINE))
    assert {key: yaml.safe_load(value) for key, value in shown.items()} == group_values(group, choice)


def test_the_help_of_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(UserError, match="data=txt is not known; .*did you mean text"):
        help_text("train", "usage", ["data=txt"])
    assert help_text("sample", "usage", ["data=txt"]) == help_text("sample", "usage")
