"""`--help`: the keys of the commented YAML files, each as a user would type it, with its default and its comment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from andrea.config.keys import CONFIGS, check_choice, choices, own_values

KEY_LINE = re.compile(r"(?P<indent> *)(?P<item>- )?(?P<name>\w+):(?: +(?P<value>\S.*?))??(?: +# (?P<comment>.*))?")
COMMENT_COLUMN = 42
# The keys of training that are set most often. `--help` shows them alone, `--help all` every key.
FIRST = """name device seed resume init_from dry_run train.steps train.max_minutes train.tokens_per_step train.eval_every
    train.sample_tokens train.patience model.d_model model.n_layer model.n_head model.sequence_length data.path
    tokenizer.vocab_size optimizer.matrix_learning_rate optimizer.weight_decay""".split()


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
    for line in (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").split("\n"):
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
    for parent in own_values(group, choice).get("defaults", ["_self_"]):
        own = read_commented(f"{group}/{choice}").keys if parent == "_self_" else keys_of_choice(group, parent)
        for key in own:
            keys[key.name] = Key(key.name, key.value, key.comment or keys[key.name].comment)
    return list(keys.values())


def typed_choices(config_name: str, words: list[str]) -> list[Key]:
    """The groups of configs/CONFIG_NAME.yaml that the words choose (data=text). Raises UserError for an unknown choice."""
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    groups = [group for group in read_commented(config_name).groups if group.name in typed]
    for group in groups:
        check_choice(group.name, typed[group.name])
    return [Key(group.name, typed[group.name], group.comment) for group in groups]


def group_help(usage: str, chosen: list[Key]) -> str:
    """The output of `GROUP=CHOICE --help`: every key of the chosen groups, with its value under this choice."""
    lines = [usage]
    for group in chosen:
        lines += ["", f"{group.name}={group.value}: {read_commented(f'{group.name}/{group.value}').description}"]
        keys = keys_of_choice(group.name, group.value)
        lines += [help_line(Key(f"{group.name}.{key.name}", key.value, key.comment)) for key in keys]
    return "\n".join([*lines, "", "--help all lists all keys."])


def help_text(config_name: str, usage: str, words: Sequence[str] = ()) -> str:
    """The output of `--help` for the command that configs/CONFIG_NAME.yaml belongs to.

    words: the other words of the command line. If they choose groups (data=text), only the keys of these groups are
    shown; without `all`, of training only the keys in FIRST. Raises UserError for an unknown choice.
    """
    if chosen := typed_choices(config_name, list(words)):
        return group_help(usage, chosen)
    file = read_commented(config_name)
    lines = [usage, "", file.description]
    if file.groups:
        lines += ["", "Groups of keys (GROUP=NAME chooses one):"]
    groups = sorted(file.groups, key=lambda group: group.name != "model")  # it is the last one in train.yaml
    for group in groups:
        names = ", ".join(choices(group.name))
        lines.append(help_line(Key(group.name, group.value, f"{group.comment}; one of: {names}")))
    lines += ["", "Keys with their defaults:"]
    if config_name == "train" and "all" not in words:
        keys = {key.name: key for key in [*file.keys, *(key for group in groups for key in default_keys(group))]}
        lines += [help_line(keys[name]) for name in FIRST]
        return "\n".join([*lines, "", f"--help all lists all {len(keys)} keys, GROUP=NAME --help those of a group."])
    lines += map(help_line, file.keys)
    for group in groups:
        chosen = read_commented(f"{group.name}/{group.value}")
        lines += ["", f"{group.name}={group.value}: {chosen.description}"]
        lines += map(help_line, default_keys(group))
    return "\n".join(lines)


def default_keys(group: Key) -> list[Key]:
    """The keys of a group as they are typed, with the values of its default choice."""
    keys = read_commented(f"{group.name}/{group.value}").keys
    return [Key(f"{group.name}.{key.name}", key.value, key.comment) for key in keys]


def help_line(key: Key) -> str:
    return f"  {key.name}={key.value}".ljust(COMMENT_COLUMN) + f"  {key.comment}"
