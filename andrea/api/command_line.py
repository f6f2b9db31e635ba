"""Turns words of the form key=value into a checked configuration: a command line, or the arguments of `andrea.train`.

Hydra only composes the YAML groups. Typed values never reach it, because its override grammar would take
`prompt="def main("` for a syntax error and `prompt=12` for a number. This module splits each word at its first '=',
checks the key against the dataclasses of `andrea.config`, and sets the value in the composed configuration. Text stays
unchanged, byte for byte. `config.parse` knows the type of each key and converts numbers.
"""

import dataclasses
import os
import typing
from dataclasses import dataclass
from typing import Any

from andrea.config import LARGEST_INTEGER, ImportConfig, UserError, lay_over, parse
from andrea.config.keys import CONFIGS, check_choice, key_types, not_key_value, type_of_key
from andrea.config.parse import plain_yaml

LONGEST_YAML = 1 << 16  # characters of a list or mapping on the command line
SWITCHES = ("-m", "--multirun")  # of a sweep, which trains many runs


@dataclass(frozen=True)
class CommandLine:
    """A command line with its keys checked, e.g. groups {'model': 'andrea-120m'} and values {'train.steps': '200'}."""

    groups: dict[str, str]
    values: dict[str, Any]


def read(kind: type, argv: list[str]) -> CommandLine:
    """Split words of the form key=value and check every key against the dataclass `kind`. Raises UserError."""
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    words: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise not_key_value(kind, word, hint_for_text(kind, word))
        if key[0] in "+~":
            raise UserError(f"{word!r}: keys cannot be added (+) or removed (~); write {key.lstrip('+~')}=…")
        key = "source" if (kind, key) == (ImportConfig, "from") else key  # no field of a dataclass can be called `from`
        hint = type_of_key(kind, key)
        check_once(words, key, word, hint)
        if dataclasses.is_dataclass(hint):
            groups[key] = value
        elif typing.get_origin(hint) is list:
            values.setdefault(key, []).append(value)
        else:
            may_be_tuple = tuple in map(typing.get_origin, typing.get_args(hint))
            is_yaml = typing.get_origin(hint) is dict or (may_be_tuple and value[:1] == "[")
            values[key] = read_yaml(key, value) if is_yaml else value
    for group, choice in groups.items():
        check_choice(group, choice)
    return CommandLine(groups, values)


def check_once(words: dict[str, str], key: str, word: str, hint: Any) -> None:
    """Add a word key=value to the words before it, by key. Raises UserError if it replaces one of them without a word.

    hint: the type of the key. The words of a list add up. One value of a mapping may be set after the mapping.
    """
    kind = typing.get_origin(hint)
    for other, earlier in words.items():
        if (other == key and kind is not list) or (kind is dict and other.startswith(f"{key}.")):
            raise UserError(f"{earlier} and {word} both set {key}; leave one out")
    words[key] = word


def hint_for_text(kind: type, word: str) -> str:
    """A hint for a word without a key: the key of a prompt, or the keys of a text to train on; '' if no hint fits."""
    keys = key_types(kind)
    if "prompt" in keys:
        return "; a text is given as prompt=…, a run as checkpoint=…"
    return "; your own text is given as data=text data.path=…" if "data" in keys and os.path.exists(word) else ""


def compose(config_name: str, line: CommandLine) -> dict:
    """The values of configs/CONFIG_NAME.yaml and of its groups, overridden by the typed values, as plain mappings."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        with initialize_config_dir(config_dir=str(CONFIGS), **hydra_defaults()):
            groups = [f"{group}={choice}" for group, choice in line.groups.items()]
            composed = hydra_compose(config_name, overrides=groups)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (*hydra_errors(), YAMLError) as error:
        raise UserError(f"configs/{config_name}.yaml, or a file of its groups, cannot be read: {error}") from error
    return lay_over(plain, line.values)


def configure(kind: type, config_name: str, argv: list[str]) -> Any:
    """Turn a command line into the checked, frozen dataclass `kind`. Raises UserError."""
    return parse(kind, compose(config_name, read(kind, argv)))


def hydra_defaults() -> dict[str, str]:
    """The arguments for the defaults of Hydra 1.3. Later versions have them anyway, and warn of the argument."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}


def hydra_errors() -> tuple[type[Exception], ...]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException


def read_yaml(key: str, value: str) -> Any:
    """`value` read as YAML: a list, a mapping or a scalar. Raises UserError."""
    hint = "write a list as [a, b], a mapping as {name: value}"
    if len(value) > LONGEST_YAML:
        raise UserError(f"{key} is {len(value)} characters long, more than the limit of {LONGEST_YAML}; {hint}")
    try:
        loaded = plain_yaml(value)
    except ValueError as error:
        raise UserError(f"{key}={value} cannot be read ({error}); {hint}") from None
    if any(isinstance(entry, int) and abs(entry) > LARGEST_INTEGER for entry in entries_of(loaded)):
        raise UserError(f"{key}={value} holds a number beyond {LARGEST_INTEGER}")
    return loaded


def entries_of(loaded: Any) -> list[Any]:
    found = [loaded]
    for entry in found:  # the list grows during the loop
        if isinstance(entry, dict):
            found += [*entry.keys(), *entry.values()]
        elif isinstance(entry, (list, tuple, set)):
            found += entry
    return found
