"""`--help`: the keys of the commented YAML files, each as a user would type it, with its default and its comment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from andrea.config import group_files

KEY_LINE = re.compile(r"(?P<indent> *)(?P<item>- )?(?P<name>\w+):(?: +(?P<value>\S.*?))??(?: +# (?P<comment>.*))?")
COMMENT_COLUMN = 42


@dataclass(frozen=True)
class Key:
    """One key of a YAML file. The name is dotted (train.steps); the value is as the file spells it."""

    name: str
    value: str
    comment: str


@dataclass(frozen=True)
class CommentedFile:
    """A file of configs/: its first comment, its groups with their default choices, and its own keys."""

    description: str
    groups: list[Key]
    keys: list[Key]


def read_commented(name: str) -> CommentedFile:
    """configs/NAME.yaml, e.g. `train` or `model/andrea-nano`; inherited keys are left out."""
    description, group_keys, keys, prefix = "", [], [], ""
    for line in (group_files.CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").split("\n"):
        if line.startswith("# "):
            description = description or line.removeprefix("# ")
        elif match := KEY_LINE.fullmatch(line):
            if match["item"]:
                group_keys.append(Key(match["name"], match["value"], match["comment"]))
            elif match["value"] is None:
                prefix = f"{match['name']}."
            elif match["name"] != "defaults":
                keys.append(
                    Key((prefix if match["indent"] else "") + match["name"], match["value"], match["comment"] or "")
                )
    return CommentedFile(description, group_keys, keys)


def keys_of_choice(group: str, choice: str) -> list[Key]:
    """All keys of GROUP=CHOICE with their values under this choice; an inherited key keeps its comment."""
    keys: dict[str, Key] = {}
    for parent in group_files.parents_of(group_files.own_values(group, choice)):
        own = read_commented(f"{group}/{choice}").keys if parent == "_self_" else keys_of_choice(group, parent)
        for key in own:
            keys[key.name] = Key(key.name, key.value, key.comment or keys[key.name].comment)
    return list(keys.values())


def typed_choices(config_name: str, words: list[str]) -> list[Key]:
    """The groups of configs/CONFIG_NAME.yaml that the words choose (data=text). Raises UserError for an unknown choice."""
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    groups = [group for group in read_commented(config_name).groups if group.name in typed]
    for group in groups:
        group_files.check_choice(group.name, typed[group.name])
    return [Key(group.name, typed[group.name], group.comment) for group in groups]


def group_help(usage: str, chosen: list[Key]) -> str:
    """The output of `GROUP=CHOICE --help`: every key of the chosen groups, with its value under this choice."""
    lines = [usage]
    for group in chosen:
        lines += ["", f"{group.name}={group.value}: {read_commented(f'{group.name}/{group.value}').description}"]
        keys = keys_of_choice(group.name, group.value)
        lines += [help_line(Key(f"{group.name}.{key.name}", key.value, key.comment)) for key in keys]
    return "\n".join([*lines, "", "--help alone lists all keys."])


def help_text(config_name: str, usage: str, words: Sequence[str] = ()) -> str:
    """The output of `--help` for the command that configs/CONFIG_NAME.yaml belongs to.

    words: the other words of the command line; if they choose groups (data=text), only the keys of these groups are
    shown. Raises UserError for an unknown choice.
    """
    if chosen := typed_choices(config_name, list(words)):
        return group_help(usage, chosen)
    file = read_commented(config_name)
    lines = [usage, "", file.description]
    if file.groups:
        lines += ["", "Groups of keys (GROUP=NAME chooses one):"]
    groups = sorted(file.groups, key=lambda group: group.name != "model")  # it is the last one in train.yaml
    for group in groups:
        names = ", ".join(group_files.choices(group.name))
        lines.append(help_line(Key(group.name, group.value, f"{group.comment}; one of: {names}")))
    lines += ["", "Keys with their defaults:"]
    lines += map(help_line, file.keys)
    for group in groups:
        chosen = read_commented(f"{group.name}/{group.value}")
        lines += ["", f"{group.name}={group.value}: {chosen.description}"]
        lines += [help_line(Key(f"{group.name}.{key.name}", key.value, key.comment)) for key in chosen.keys]
    return "\n".join(lines)


def help_line(key: Key) -> str:
    return f"  {key.name}={key.value}".ljust(COMMENT_COLUMN) + f"  {key.comment}"
