"""`--help`: the keys of the commented YAML files, each as a user would type it, with its default and its comment."""

from __future__ import annotations

import re
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


def help_text(config_name: str, usage: str) -> str:
    """The output of `--help` for the command that configs/CONFIG_NAME.yaml belongs to."""
    file = read_commented(config_name)
    lines = [usage, "", file.description]
    if file.groups:
        lines += ["", "Groups of keys (GROUP=NAME chooses one):"]
    for group in file.groups:
        names = ", ".join(group_files.choices(group.name))
        lines.append(help_line(Key(group.name, group.value, f"{group.comment}; one of: {names}")))
    lines += ["", "Keys with their defaults:"]
    lines += map(help_line, file.keys)
    for group in file.groups:
        chosen = read_commented(f"{group.name}/{group.value}")
        lines += ["", f"{group.name}={group.value}: {chosen.description}"]
        lines += [help_line(Key(f"{group.name}.{key.name}", key.value, key.comment)) for key in chosen.keys]
    return "\n".join(lines)


def help_line(key: Key) -> str:
    return f"  {key.name}={key.value}".ljust(COMMENT_COLUMN) + f"  {key.comment}"
