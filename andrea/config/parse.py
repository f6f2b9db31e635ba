"""The only parser of configurations, from plain mappings to frozen dataclasses. All other code reads the dataclasses."""

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal

from andrea.config.checks import CHECKS
from andrea.config.keys import group_values, key_types, nearest, with_current_keys
from andrea.config.schema import (
    LARGEST_INTEGER,
    DottedPath,
    PathText,
    RunConfig,
    Text,
    UserError,
    is_dotted_path,
    readable_path,
)

DEEPEST_YAML = 20
# Errors that PyYAML raises, besides its own, for malformed values such as 2001-99-99 or !!bool x
YAML_FAULTS = (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError)


class WrongType(UserError):
    """A value does not have the expected type. In a union, another type may still fit."""


def parse(kind: type, values: Any, path: str = "") -> Any:
    """Turn a plain mapping into the frozen dataclass `kind`, checking names, types, ranges and combinations.

    path: the dotted key of `values` ('' at the top), used in messages. Raises UserError.
    """
    config = parse_values(kind, values, path)
    check_combinations(config, path)
    return config


def group_config(group: str, choice: str, **changes: Any) -> Any:
    """GROUP=CHOICE as the group's dataclass, with `changes` of its keys: group_config("model", "gpt2", n_layer=2)."""
    return parse(key_types(RunConfig)[group], group_values(group, choice) | changes, group)


def parse_values(kind: type, values: Any, path: str = "") -> Any:
    """As `parse`, without checking combinations of values."""
    return parse_group(kind, with_current_keys(kind, values), path)


def check_combinations(config: Any, path: str = "") -> None:
    """Check the values of a dataclass, and of all dataclasses in it, against each other. Raises UserError."""
    parts = config if isinstance(config, dict) else vars(config) if dataclasses.is_dataclass(config) else {}
    for key, part in parts.items():
        check_combinations(part, f"{path}.{key}" if path else key)
    if type(config) in CHECKS:
        for message in CHECKS[type(config)](config, path):
            raise UserError(message)


def parse_group(kind: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{path}={values!r}: {path} is a group of keys; set one of them with {path}.KEY=…")
    hints = key_types(kind)
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in hints:
            near = nearest(f"{prefix}{key}", [prefix + name for name in hints])
            raise UserError(f"unknown key {prefix}{key}{near}")
    parsed = {}
    for field in dataclasses.fields(kind):
        where = prefix + field.name
        if field.name in values:
            parsed[field.name] = convert(hints[field.name], values[field.name], where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} is missing; set {where}=…")
    return kind(**parsed)


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value`, of the key `where`, as the type `hint` of a dataclass; numbers may come as text. Raises UserError."""
    if dataclasses.is_dataclass(hint):
        return parse_group(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        converted = convert(arguments[0], value, where)
        for limit in arguments[1:]:
            limit(where, converted)
        return converted
    if origin in (typing.Union, types.UnionType):
        return convert_union(hint, value, where)
    if origin is Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        shown = ", ".join(map(str, arguments))
        raise WrongType(f"{where}={value} is not allowed; allowed: {shown}{nearest(str(value), map(str, arguments))}")
    if origin in (list, tuple):
        entries = value if isinstance(value, (list, tuple)) else [value]
        return origin(convert(arguments[0], entry, where) for entry in entries)
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongType(f"{where}={value!r} is not a mapping; write {where}='{{NAME: {{…}}}}'")
        return {str(key): convert(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    return convert_scalar(hint, value, where)


def convert_union(hint: Any, value: Any, where: str) -> Any:
    choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    if type(None) in typing.get_args(hint):
        # The command line accepts null, as YAML does. For text, `none` and `None` are not null: they may be a name.
        spellings = ("null",) if any(map(is_text, choices)) else ("null", "none", "None")
        if value is None or type(value) is str and value in spellings:
            return None
    for choice in choices:
        try:
            return convert(choice, value, where)
        except WrongType:
            continue
    literals = [word for choice in choices if typing.get_origin(choice) is Literal for word in typing.get_args(choice)]
    raise WrongType(f"{where}={value} is not allowed; allowed: {describe(hint)}{nearest(str(value), literals)}")


def is_null(value: Any) -> bool:
    """Whether a value for a key that holds text, not parsed yet, is null or empty."""
    return value in (None, "", "null")


def is_text(hint: Any) -> bool:
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    return isinstance(bare, type) and issubclass(bare, Text)


def convert_scalar(hint: Any, value: Any, where: str) -> Any:
    wrong = WrongType(f"{where}={value} is not allowed; allowed: {describe(hint)}")
    if isinstance(value, (dict, list)) or value is None:
        raise wrong
    if hint is bool:
        if str(value).lower() not in ("true", "false"):
            raise wrong
        return str(value).lower() == "true"
    if hint is int:
        whole = whole_number(value)
        if whole is None:
            raise wrong
        if abs(whole) > LARGEST_INTEGER:
            raise UserError(f"{where}={value} is too large; allowed: whole numbers up to {LARGEST_INTEGER}")
        return whole
    if hint is float:
        try:
            if isinstance(value, bool):
                raise wrong
            return float(value)
        except (ValueError, OverflowError):
            raise wrong from None
    if hint is str and any("\ud800" <= character <= "\udfff" for character in str(value)):
        raise UserError(f"{where}={value!r} is not text in UTF-8")
    if hint is DottedPath and not is_dotted_path(str(value)):
        raise wrong
    return readable_path(where, str(value)) if hint is PathText else str(value)


def whole_number(value: Any) -> int | None:
    """12, 12.0, "12" and "1e3" as integers; None for anything that is not a whole number."""
    try:
        number = float(value) if not isinstance(value, int) else value
        if isinstance(value, bool) or number != int(number):
            return None
        # Digits are converted directly, because a float would round large numbers.
        is_digits = isinstance(value, (int, str)) and str(value).lstrip("+-").isdigit()
        return int(value) if is_digits else int(number)
    except (ValueError, OverflowError):
        return None


def describe(hint: Any) -> str:
    """Describe a type for a user: 'a whole number or auto'."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Text: "text",
        PathText: "a path",
        DottedPath: "the dotted path of a class of your own (my_module.MyClass)",
        type(None): "null",
    }
    return names.get(hint, "a group of keys" if dataclasses.is_dataclass(hint) else "a list")


def as_typed(value: Any) -> str:
    """A value of the configuration, written as on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def to_plain(config: Any) -> dict:
    """The dataclass as plain mappings, lists and numbers, without `trust`, which must never be read from a saved one."""
    plain = with_lists(dataclasses.asdict(config))
    plain.pop("trust", None)
    return plain


def with_lists(value: Any) -> Any:
    """`value` with each tuple, at any depth, replaced by a list, as JSON and YAML read it back."""
    if isinstance(value, dict):
        return {key: with_lists(entry) for key, entry in value.items()}
    return [with_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def plain_yaml(text: str) -> Any:
    """The value of YAML by somebody else. Raises ValueError, also for an alias: aliases of aliases fill any memory."""
    import yaml

    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST_YAML:
                raise ValueError("it has an alias (*name), or is nested too deeply")
        return yaml.safe_load(text)
    except (yaml.YAMLError, *YAML_FAULTS) as error:
        problem = str(getattr(error, "problem", None) or error)
        raise ValueError(" ".join(problem.split())[:200] or type(error).__name__) from None
