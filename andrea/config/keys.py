"""The dotted keys of a configuration (train.steps): their types, and the old names of renamed keys.

The old name of a renamed key stays valid forever. When it is typed on the command line, one line says its new name. In
a saved configuration (a checkpoint or a config.yaml) it is accepted silently.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from andrea.config.errors import UserError
from andrea.config.schema import HealthConfig, SampleConfig

RENAMED: dict[Any, dict[str, str]] = {  # dataclass -> {old name: new name}
    HealthConfig: {"showing": "failing_share"},
    SampleConfig: {"guess": "lookahead"},
}


@functools.cache
def key_types(kind: type) -> dict[str, Any]:
    """Each key of the dataclass `kind` with its type, limits included (Annotated)."""
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def dotted_keys(kind: type) -> list[str]:
    """Every dotted key of the dataclass `kind`; a group comes before its keys."""
    found = []
    for name, hint in key_types(kind).items():
        found.append(name)
        if dataclasses.is_dataclass(hint):
            found += [f"{name}.{key}" for key in dotted_keys(hint)]
    return found


def nearest(word: str, allowed: Iterable[str]) -> str:
    """'; did you mean X?' for the allowed word with the nearest spelling, or '' if none is near."""
    found = get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def member_type(hint: Any, name: Any) -> Any:
    """The type of the key `name` in a value of the type `hint`, or None if there is no such key."""
    if typing.get_origin(hint) is dict:
        return typing.get_args(hint)[1]
    return key_types(hint).get(name) if dataclasses.is_dataclass(hint) else None


def type_of_key(kind: type, key: str) -> Any:
    """The type of a dotted key. Raises UserError for an unknown key, with the nearest spelling."""
    hint: Any = kind
    names = key.split(".")
    for depth, name in enumerate(names):
        inner = member_type(hint, name)
        if inner is None:
            known = key_types(hint) if dataclasses.is_dataclass(hint) else ()
            siblings = [".".join([*names[:depth], each]) for each in known]
            raise UserError(f"unknown key {key}{nearest(key, siblings) or nearest(key, dotted_keys(kind))}")
        hint = inner
    return hint


def current_key(kind: type, key: str) -> str:
    """The dotted key of the dataclass `kind` under its current name: health.showing becomes health.failing_share."""
    hint: Any = kind
    names = []
    for old in key.split("."):
        names.append(RENAMED.get(hint, {}).get(old, old))
        hint = member_type(hint, names[-1])
    return ".".join(names)


def with_current_keys(hint: Any, values: Any) -> Any:
    """Replace old keys of `values`, at any depth, by their current names. hint: type of `values`.

    Raises UserError if a key is set under both names.
    """
    if hint is None or not isinstance(values, dict):
        return values
    new_names, renamed = RENAMED.get(hint, {}), {}
    for key, value in values.items():
        new = new_names.get(key, key)
        if new != key and new in values:
            raise UserError(f"{key} is now called {new}, and both are set; leave {key} out")
        renamed[new] = with_current_keys(member_type(hint, new), value)
    return renamed


def lay_over(plain: dict, values: dict[str, Any]) -> dict:
    """Set the values of dotted keys in nested mappings, in place; returns the mapping."""
    for key, value in values.items():
        *groups, last = key.split(".")
        inner = plain
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return plain
