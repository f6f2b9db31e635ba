"""Reads the YAML files of configs/: the choices of each group, and the values of each choice.

The default choice of each group, named in configs/train.yaml, holds every key of the group with a comment. The other
choices inherit its values (`defaults: [NAME, _self_]`) and hold only what differs.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from andrea.config.keys import key_types, nearest
from andrea.config.limits import UserError
from andrea.config.parse import parse
from andrea.config.schema import RunConfig

# A folder inside the installed package; in a clone, a link to configs/.
CONFIGS = Path(str(importlib.resources.files("andrea"))) / "configs"


def choices(group: str) -> list[str]:
    """The names that GROUP=NAME accepts."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def check_choice(group: str, choice: str) -> None:
    """Raises UserError if GROUP=CHOICE names no file."""
    names = choices(group)
    if choice not in names:
        own = "; your own text is given as data=text data.path=…" if group == "data" and os.path.exists(choice) else ""
        raise UserError(f"{group}={choice} is not known; allowed: {', '.join(names)}{own or nearest(choice, names)}")


def own_values(group: str, choice: str) -> dict[str, Any]:
    """The content of configs/GROUP/CHOICE.yaml, with `defaults` naming the choices that it inherits from."""
    import yaml

    return yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))


def group_values(group: str, choice: str) -> dict[str, Any]:
    """The values that GROUP=CHOICE stands for, inherited values included, as Hydra would compose them."""
    values: dict[str, Any] = {}
    own = own_values(group, choice)
    for parent in own.pop("defaults", ["_self_"]):
        values |= own if parent == "_self_" else group_values(group, parent)
    return values


def settings_of_runs() -> dict[str, Any]:
    """The content of configs/train.yaml: the default of each key outside the groups, and the `defaults` of the groups."""
    import yaml

    return yaml.safe_load((CONFIGS / "train.yaml").read_text(encoding="utf-8"))


def chosen_groups(typed: Mapping[str, str]) -> dict[str, str]:
    """The choice of each group of configs/train.yaml, where the groups `typed` are typed: {"model": "andrea-nano", …}."""
    listed = settings_of_runs()["defaults"]
    defaults = {group: choice for entry in listed if isinstance(entry, dict) for group, choice in entry.items()}
    return defaults | dict(typed)


def group_config(group: str, choice: str, **changes: Any) -> Any:
    """GROUP=CHOICE as the group's dataclass, with `changes` of its keys: group_config("model", "gpt2", n_layer=2)."""
    return parse(key_types(RunConfig)[group], group_values(group, choice) | changes, group)
