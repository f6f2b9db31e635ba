"""Reads the YAML files of configs/: the choices of each group, and the values of each choice.

The default choice of each group, named in configs/train.yaml, holds every key of the group with a comment. The other
choices inherit its values (`defaults: [NAME, _self_]`) and hold only what differs.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

from andrea.config.keys import key_types
from andrea.config.parse import parse
from andrea.config.schema import RunConfig

# A folder inside the installed package; in a clone, a link to configs/.
CONFIGS = Path(str(importlib.resources.files("andrea"))) / "configs"


def choices(group: str) -> list[str]:
    """The names that GROUP=NAME accepts."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def group_values(group: str, choice: str) -> dict[str, Any]:
    """The values that GROUP=CHOICE stands for, inherited values included, as Hydra would compose them."""
    import yaml

    values: dict[str, Any] = {}
    own = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    for parent in own.pop("defaults", ["_self_"]):
        values |= own if parent == "_self_" else group_values(group, parent)
    return values


def group_config(group: str, choice: str, **changes: Any) -> Any:
    """GROUP=CHOICE as the group's dataclass, with `changes` of its keys: group_config("model", "gpt2", n_layer=2)."""
    return parse(key_types(RunConfig)[group], group_values(group, choice) | changes, group)
