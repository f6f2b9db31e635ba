"""`--help`: the keys of the commented YAML files, each as a user would type it, with its default and its comment."""

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
                dotted = (prefix if match["indent"] else "") + match["name"]
                keys.append(Key(dotted, match["value"], match["comment"] or ""))
    return CommentedFile(description, group_keys, keys)


def keys_of_choice(group: str, choice: str) -> list[Key]:
    """All keys of GROUP=CHOICE with their values under this choice; an inherited key keeps its comment."""
    keys: dict[str, Key] = {}
    for parent in own_values(f"{group}/{choice}").get("defaults", ["_self_"]):
        own = read_commented(f"{group}/{choice}").keys if parent == "_self_" else keys_of_choice(group, parent)
        for key in own:
            keys[key.name] = Key(key.name, key.value, key.comment or keys[key.name].comment)
    return list(keys.values())


def help_text(config_name: str, usage: str, words: Sequence[str] = ()) -> str:
    """The output of `--help` for the command that configs/CONFIG_NAME.yaml belongs to.

    words: the other words of the command line. If they choose groups (data=text), only the keys of these groups are
    shown; without `all`, of training only the keys in FIRST. Raises UserError for an unknown choice.
    """
    file, typed = read_commented(config_name), dict(word.split("=", 1) for word in words if "=" in word)
    if chosen := [Key(group.name, typed[group.name], group.comment) for group in file.groups if group.name in typed]:
        for group in chosen:
            check_choice(group.name, group.value)
        return "\n".join([usage, *lines_of_groups(chosen), "", "--help all lists all keys."])
    lines = [usage, "", file.description]
    if file.groups:
        lines += ["", "Groups of keys (GROUP=NAME chooses one):"]
    groups = sorted(file.groups, key=lambda group: group.name != "model")  # it is the last one in train.yaml
    for group in groups:
        names = ", ".join(choices(group.name))
        lines.append(help_line(Key(group.name, group.value, f"{group.comment}; one of: {names}")))
    lines += ["", "Keys with their defaults:"]
    if config_name == "train" and "all" not in words:
        keys = {key.name: key for key in [*file.keys, *(key for group in groups for key in keys_of_group(group))]}
        lines += [help_line(keys[name]) for name in FIRST]
        return "\n".join([*lines, "", f"--help all lists all {len(keys)} keys, GROUP=NAME --help those of a group."])
    return "\n".join([*lines, *map(help_line, file.keys), *lines_of_groups(groups)])


def lines_of_groups(groups: list[Key]) -> list[str]:
    """A headline for each GROUP=CHOICE, and every key of the group with its value under this choice."""
    lines = []
    for group in groups:
        lines += ["", f"{group.name}={group.value}: {read_commented(f'{group.name}/{group.value}').description}"]
        lines += map(help_line, keys_of_group(group))
    return lines


def keys_of_group(group: Key) -> list[Key]:
    """The keys of GROUP=CHOICE as they are typed."""
    keys = keys_of_choice(group.name, group.value)
    return [Key(f"{group.name}.{key.name}", key.value, key.comment) for key in keys]


def help_line(key: Key) -> str:
    return f"  {key.name}={key.value}".ljust(COMMENT_COLUMN) + f"  {key.comment}"
