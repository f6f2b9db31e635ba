"""The YAML files of configs/: every key stands once with its comment, and every choice has a value for every key."""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest
import yaml
from conftest import CONFIGS_OF_COMMANDS

from andrea.api.command_line import CommandLine, compose, configure
from andrea.cli.help import FIRST, help_text, read_commented
from andrea.config import (
    CONFIGS,
    RunConfig,
    UserError,
    group_config,
    group_values,
    parse,
)
from andrea.config.keys import choices, dotted_keys

pytestmark = pytest.mark.untraced

MOST_KEYS = 100  # of training: 95, model.lora_rank, and those of `objective`
GROUPS = {group.name: group.value for group in read_commented("train").groups}
CHOICES = [(group, choice) for group in GROUPS for choice in choices(group)]
# What a choice needs besides its name.
NEEDS = {
    ("tokenizer", "hf"): ["tokenizer.path=."],
    ("data", "text"): ["data.path=x"],
    ("data", "chat"): ["data.path=x"],
    ("data", "shards"): ["data.path=x"],
    ("objective", "dpo"): ["data=chat", "data.path=x", "init_from=x", "attention.across_documents=false"],
    ("objective", "grpo"): ["data=python_chat", "init_from=x", "attention.across_documents=false"],
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
    assert set(values) == fields_of(kind)
    composed = compose("train", CommandLine({group: choice}, {}))[group]
    # YAML 1.1 reads 1e-6 as text, OmegaConf as a number; `parse` takes both.
    assert {key: as_number(value) for key, value in values.items()} == composed


def as_number(value: typing.Any) -> typing.Any:
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+e-\d+", value) else value


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
    for choice in [choice for choice in choices(group) if choice != default]:
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
