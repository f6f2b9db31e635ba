"""The border between the terminal and the package: command line in, checked configuration or one line of error out.

Hydra composes the YAML groups, and that is all it is asked to do. What the user typed never meets Hydra's override
grammar, in which `prompt="def main("` is a syntax error and `prompt=12` a number: this module splits each word at its
first '=', checks the key's spelling against the dataclasses of `andrea.config`, and lays the value over the composed
configuration itself. Text arrives byte for byte; numbers are read by `config.parse`, which knows the type wanted.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from andrea.config import LARGEST_INTEGER, Text, UserError, group_files, nearest, parse
from andrea.config.keys import current_key, dotted_keys, type_of_key
from andrea.runtime import torchrun
from andrea.runtime.files import StorageFailed

LONGEST_LINE = 2000  # characters of a message
LONGEST_YAML = 1 << 16  # characters of a list or mapping on the command line
# What PyYAML lets through, besides its own errors, where a value does not fit its tag or its form: 2001-99-99, !!bool x
YAML_FAULTS = (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError)


@dataclass(frozen=True)
class CommandLine:
    """What was typed, checked for spelling: `groups` {'model': 'andrea-120m'}, `values` {'train.steps': '200'}."""

    groups: dict[str, str]
    values: dict[str, Any]


def run(main: Callable[[list[str]], int], argv: list[str]) -> None:
    """Run `main(argv)` and leave the process with its exit code; a UserError becomes one line and exit code 2.

    Of many ranks the first one shows what all have to say; what a restart by torchrun cannot cure is not tried again.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be UTF-8
    if (code := torchrun.recorded_exit_code()) is not None:
        sys.exit(code)
    try:
        code = main(argv)
        sys.stdout.flush()
    except UserError as error:
        if not torchrun.is_rank_0():
            torchrun.give_rank_0_time()
        if not isinstance(error, torchrun.ErrorOfRank0) or torchrun.is_rank_0():
            print(f"error: {torchrun.rank_prefix()}{one_line(str(error))}", file=sys.stderr)
        code = 2
    except StorageFailed as error:
        hint = "what was saved before is whole: make room, then go on with resume=auto"
        print(f"error: {torchrun.rank_prefix()}{one_line(str(error))}; {hint}", file=sys.stderr)
        code = 5
    except torchrun.RankLost as error:
        if torchrun.is_rank_0():
            hint = "torchrun starts all ranks again where --max-restarts allows it; resume=auto then goes on"
            print(f"error: another rank is gone: {one_line(str(error))}; {hint}", file=sys.stderr)
        code = torchrun.RANK_LOST
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader (`| head`) has left: nothing is wrong, and nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    torchrun.record_exit_code(code)
    if code and torchrun.has_many_ranks():  # threads and cards may wait for other ranks, and nothing would wake them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def one_line(message: str) -> str:
    """The message with line ends and unprintable characters written as escapes, so that it stays one line.

    The middle of a very long one, which quotes what was typed, is left out.
    """
    if len(message) > LONGEST_LINE:
        message = f"{message[: LONGEST_LINE // 2]} … {message[-LONGEST_LINE // 2 :]}"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in message
    )


def read(kind: type, argv: list[str]) -> CommandLine:
    """Split `key=value` words and check every key against the dataclass `kind`. Raises UserError."""
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in with_current_names(kind, argv):
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"{word!r} is not of the form key=value{nearest(key, dotted_keys(kind))}; --help lists the keys"
            )
        if key[:1] in "+~":
            raise UserError(f"{word!r}: keys are neither added (+) nor removed (~) here; write {key.lstrip('+~')}=…")
        hint = type_of_key(kind, key)
        if dataclasses.is_dataclass(hint):
            groups[key] = value
        elif typing.get_origin(hint) is list:
            values.setdefault(key, []).extend(read_list(hint, key, value))
        elif typing.get_origin(hint) is dict:
            values[key] = read_yaml(key, value)
        else:
            values[key] = value
    for group, choice in groups.items():
        check_choice(group, choice)
    return CommandLine(groups, values)


def with_current_names(kind: type, argv: list[str]) -> list[str]:
    """argv with each renamed key under its present name; rank 0 names each such key once, on standard error."""
    words, renamed = [], {}
    for word in argv:
        key, equals, value = word.partition("=")
        words.append(current_key(kind, key) + equals + value)
        renamed[key] = current_key(kind, key)
    for old, new in renamed.items():
        if old != new and torchrun.is_rank_0():
            print(f"{old} is now called {new}", file=sys.stderr)
    return words


def compose(config_name: str, line: CommandLine) -> dict:
    """The values of configs/CONFIG_NAME.yaml and its chosen groups, then the typed values, as plain mappings."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        with initialize_config_dir(config_dir=str(group_files.CONFIGS), version_base="1.3"):
            composed = hydra_compose(
                config_name, overrides=[f"{group}={choice}" for group, choice in line.groups.items()]
            )
        plain = OmegaConf.to_container(composed, resolve=True)
    except (*hydra_errors(), YAMLError) as error:
        raise UserError(f"configs/{config_name}.yaml or a group it names cannot be read: {error}") from error
    return lay_over(plain, line.values)


def configure(kind: type, config_name: str, argv: list[str]) -> Any:
    """From the command line to the checked, frozen configuration: `read`, `compose`, `parse`."""
    return parse(kind, compose(config_name, read(kind, argv)))


def hydra_errors() -> tuple[type[Exception], ...]:
    """What Hydra raises over what it was given."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException


def lay_over(plain: dict, values: dict[str, Any]) -> dict:
    """Set dotted keys in nested mappings, in place; returns the mapping."""
    for key, value in values.items():
        *groups, last = key.split(".")
        place = plain
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return plain


def check_choice(group: str, choice: str) -> None:
    choices = group_files.choices(group)
    if choice not in choices:
        raise UserError(f"{group}={choice} is not known; allowed: {', '.join(choices)}{nearest(choice, choices)}")


def read_list(hint: Any, key: str, value: str) -> list:
    """A repeated text key collects its words as they are; other lists may also be written [a, b]."""
    if issubclass(typing.get_args(hint)[0], Text):
        return [value]
    loaded = read_yaml(key, value)
    return loaded if isinstance(loaded, list) else [loaded]


def read_yaml(key: str, value: str) -> Any:
    """The list, mapping or scalar that `value` spells. Raises UserError."""
    import yaml

    hint = "write a list as [a, b], a mapping as {name: value}"
    if len(value) > LONGEST_YAML:
        raise UserError(f"{key} is {len(value)} characters long, at most {LONGEST_YAML} are read; {hint}")
    try:
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(value, Loader=yaml.SafeLoader))
        loaded = None if aliases else yaml.safe_load(value)
    except (yaml.YAMLError, *YAML_FAULTS):
        raise UserError(f"{key}={value} cannot be read; {hint}") from None
    if aliases:  # a few of them can stand for more than any memory holds
        raise UserError(f"{key}={value} has an alias (*name), which is not read here; write out what it stands for")
    if any(isinstance(entry, int) and abs(entry) > LARGEST_INTEGER for entry in entries_of(loaded)):
        raise UserError(f"{key}={value} holds a number beyond {LARGEST_INTEGER}")
    return loaded


def entries_of(loaded: Any) -> list[Any]:
    """Every entry of nested lists and mappings, keys too."""
    found = [loaded]
    for entry in found:  # grows as it is read
        if isinstance(entry, dict):
            found += [*entry.keys(), *entry.values()]
        elif isinstance(entry, (list, tuple, set)):
            found += entry
    return found
