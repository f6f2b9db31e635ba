"""Keys that have been renamed. The old name stays accepted for good.

An old name on the command line is answered with one line that names the new key. An old name in a saved configuration, a
checkpoint's or a config.yaml, is accepted without a word.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from andrea.config.errors import UserError
from andrea.config.schema import HealthConfig, SampleConfig

RENAMED: dict[Any, dict[str, str]] = {  # dataclass -> {old name: new name}
    HealthConfig: {"showing": "failing_share"},
    SampleConfig: {"guess": "lookahead"},
}


def current_key(kind: type, key: str) -> str:
    """The dotted key of the dataclass `kind` under its present name: health.showing becomes health.failing_share."""
    hint: Any = kind
    names = []
    for old in key.split("."):
        names.append(RENAMED.get(hint, {}).get(old, old))
        hint = member_hint(hint, names[-1])
    return ".".join(names)


def with_current_keys(hint: Any, values: Any) -> Any:
    """`values` of the type `hint` with every key, at any depth, under its present name. Raises UserError."""
    if hint is None or not isinstance(values, dict):
        return values
    new_names, renamed = RENAMED.get(hint, {}), {}
    for key, value in values.items():
        new = new_names.get(key, key)
        if new != key and new in values:
            raise UserError(f"{key} is now called {new}, and both are set; leave {key} out")
        renamed[new] = with_current_keys(member_hint(hint, new), value)
    return renamed


def member_hint(hint: Any, name: Any) -> Any:
    """The type of the key `name` in the type `hint`, or None where there is no such key."""
    if typing.get_origin(hint) is dict:
        return typing.get_args(hint)[1]
    return typing.get_type_hints(hint).get(name) if dataclasses.is_dataclass(hint) else None
