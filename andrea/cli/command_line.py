"""Turns a command line into a checked configuration, and an exception into one line and an exit code.

Hydra only composes the YAML groups. Typed values never reach it, because its override grammar would take
`prompt="def main("` for a syntax error and `prompt=12` for a number. This module splits each word at its first '=',
checks the key against the dataclasses of `andrea.config`, and sets the value in the composed configuration. Text stays
unchanged, byte for byte. `config.parse` knows the type of each key and converts numbers.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from andrea.config import LARGEST_INTEGER, ImportConfig, UserError, group_files, lay_over, parse
from andrea.config.keys import key_types, not_key_value, type_of_key
from andrea.config.parse import plain_yaml
from andrea.runtime import shared_cores, torchrun
from andrea.runtime.files import REMEDIES, StorageFailed
from andrea.runtime.out_of_memory import is_out_of_memory
from andrea.runtime.streams import printable, unfailing_output

LONGEST_LINE = 2000  # characters of a message
MORE_MEMORY = (
    "free some memory, raise the limit of this process (ulimit -v), or use less: when training, train.micro_batch=1 "
    "and a smaller model=…; when sampling, a smaller num_samples=…"
)
TEMPORARY = "free some space on their disk, or set the environment variable TMPDIR to a writable folder"
LONGEST_YAML = 1 << 16  # characters of a list or mapping on the command line


@dataclass(frozen=True)
class CommandLine:
    """A command line with its keys checked, e.g. groups {'model': 'andrea-120m'} and values {'train.steps': '200'}."""

    groups: dict[str, str]
    values: dict[str, Any]


def run(main: Callable[[list[str]], int], argv: list[str]) -> None:
    """Run `main(argv)` and exit with its exit code; a UserError becomes one line and exit code 2.

    An exit code that a restart cannot cure is recorded, so that ranks restarted by torchrun exit with it at once. A
    command continues if its output cannot be written.
    """
    shared_cores.limit_spins()
    with unfailing_output():
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be UTF-8
        if (code := torchrun.recorded_exit_code()) is not None:
            sys.exit(code)
        code = exit_code_of(main, argv)
        torchrun.record_exit_code(code)
        sys.stdout.flush()
        sys.stderr.flush()
        if code and torchrun.has_many_ranks():  # a normal exit would wait for threads and GPUs that wait for lost ranks
            os._exit(code)
        sys.exit(code)


def exit_code_of(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of `main(argv)`. Only rank 0 prints an error that all ranks have in common."""
    try:
        return main(argv)
    except UserError as error:
        if not torchrun.is_rank_0():
            torchrun.give_rank_0_time()
        if not isinstance(error, torchrun.ErrorOfRank0) or torchrun.is_rank_0():
            print(f"error: {torchrun.rank_prefix()}{one_line(str(error))}", file=sys.stderr)
        return 2
    except StorageFailed as error:
        print(f"error: {torchrun.rank_prefix()}{one_line(str(error))}; {error.advice}", file=sys.stderr)
        return 5
    except OSError as error:
        is_temporary = "temporary directory" in str(error.strerror)  # of Python's tempfile, which torch uses
        if not is_temporary and error.errno not in REMEDIES:
            raise
        reason = error.strerror if is_temporary else f"{error.filename or 'a file'} cannot be used: {error.strerror}"
        remedy = TEMPORARY if is_temporary else REMEDIES[error.errno]
        print(f"error: {torchrun.rank_prefix()}{one_line(reason)}; {remedy}", file=sys.stderr)
        return 5
    except torchrun.RankLost as error:
        if torchrun.is_rank_0():
            hint = "if --max-restarts allows it, torchrun restarts all ranks, and resume=auto continues the run"
            print(f"error: another rank was lost: {one_line(str(error))}; {hint}", file=sys.stderr)
        return torchrun.RANK_LOST
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(str(error).partition("\n")[0])[:200]
        shown = f"out of memory ({reason})" if reason else "out of memory"  # Python's own MemoryError says nothing
        print(f"error: {torchrun.rank_prefix()}{shown}; {MORE_MEMORY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def one_line(message: str) -> str:
    """The message on one line: unprintable characters are escaped, and a very long message loses its middle."""
    if len(message) > LONGEST_LINE:
        message = f"{message[: LONGEST_LINE // 2]} … {message[-LONGEST_LINE // 2 :]}"
    return printable(message)


def read(kind: type, argv: list[str]) -> CommandLine:
    """Split words of the form key=value and check every key against the dataclass `kind`. Raises UserError."""
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    words: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals:
            raise not_key_value(kind, word, hint_for_text(kind, word))
        if key[:1] in "+~":
            raise UserError(f"{word!r}: keys cannot be added (+) or removed (~); write {key.lstrip('+~')}=…")
        key = "source" if (kind, key) == (ImportConfig, "from") else key  # no field of a dataclass can be called `from`
        hint = type_of_key(kind, key)
        check_once(words, key, word, hint)
        if dataclasses.is_dataclass(hint):
            groups[key] = value
        elif typing.get_origin(hint) is list:
            values.setdefault(key, []).append(value)
        elif typing.get_origin(hint) is dict or (value.startswith("[") and may_be_list(hint)):
            values[key] = read_yaml(key, value)
        else:
            values[key] = value
    for group, choice in groups.items():
        group_files.check_choice(group, choice)
    return CommandLine(groups, values)


def check_once(words: dict[str, str], key: str, word: str, hint: Any) -> None:
    """Add a word key=value to the words before it, by key. Raises UserError if it replaces one of them without a word.

    hint: the type of the key. The words of a list add up. One value of a mapping may be set after the mapping.
    """
    kind = typing.get_origin(hint)
    for other, earlier in words.items():
        if (other == key and kind is not list) or (kind is dict and other.startswith(f"{key}.")):
            raise UserError(f"{earlier} and {word} both set {key}; leave one out")
    words[key] = word


def hint_for_text(kind: type, word: str) -> str:
    """A hint for a word without a key: the key of a prompt, or the keys of a text to train on; '' if no hint fits."""
    keys = key_types(kind)
    if "prompt" in keys:
        return "; a text is given as prompt=…, a run as checkpoint=…"
    return "; your own text is given as data=text data.path=…" if "data" in keys and os.path.exists(word) else ""


def compose(config_name: str, line: CommandLine) -> dict:
    """The values of configs/CONFIG_NAME.yaml and of its groups, overridden by the typed values, as plain mappings."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        with initialize_config_dir(config_dir=str(group_files.CONFIGS), **hydra_defaults()):
            composed = hydra_compose(
                config_name, overrides=[f"{group}={choice}" for group, choice in line.groups.items()]
            )
        plain = OmegaConf.to_container(composed, resolve=True)
    except (*hydra_errors(), YAMLError) as error:
        raise UserError(
            f"configs/{config_name}.yaml, or a group file that it names, cannot be read: {error}"
        ) from error
    return lay_over(plain, line.values)


def configure(kind: type, config_name: str, argv: list[str]) -> Any:
    """Turn a command line into the checked, frozen dataclass `kind`. Raises UserError."""
    return parse(kind, compose(config_name, read(kind, argv)))


def hydra_defaults() -> dict[str, str]:
    """The arguments for the defaults of Hydra 1.3. Later versions have them anyway, and warn of the argument."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}


def hydra_errors() -> tuple[type[Exception], ...]:
    """The exceptions that Hydra raises for invalid input."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException


def may_be_list(hint: Any) -> bool:
    """Whether a value of the type `hint` may be a list, among others: number | list."""
    return any(typing.get_origin(choice) is tuple for choice in typing.get_args(hint))


def read_yaml(key: str, value: str) -> Any:
    """`value` read as YAML: a list, a mapping or a scalar. Raises UserError."""
    hint = "write a list as [a, b], a mapping as {name: value}"
    if len(value) > LONGEST_YAML:
        raise UserError(f"{key} is {len(value)} characters long, more than the limit of {LONGEST_YAML}; {hint}")
    try:
        loaded = plain_yaml(value)
    except ValueError as error:
        raise UserError(f"{key}={value} cannot be read ({error}); {hint}") from None
    if any(isinstance(entry, int) and abs(entry) > LARGEST_INTEGER for entry in entries_of(loaded)):
        raise UserError(f"{key}={value} holds a number beyond {LARGEST_INTEGER}")
    return loaded


def entries_of(loaded: Any) -> list[Any]:
    """Every entry of nested lists and mappings, keys included."""
    found = [loaded]
    for entry in found:  # the list grows during the loop
        if isinstance(entry, dict):
            found += [*entry.keys(), *entry.values()]
        elif isinstance(entry, (list, tuple, set)):
            found += entry
    return found
