"""The fields of `state.json`, and their check: whoever writes a checkpoint can write the checksums of its files too."""

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from andrea.checkpoint.tensors import Damaged
from andrea.config import UserError
from andrea.config.keys import key_types
from andrea.config.parse import describe
from andrea.config.schema import LARGEST_STEP, Between

STEP_NAME = re.compile(r"step-\d{8,}")
WANDB_ID = re.compile("[0-9A-Za-z_-]{1,128}")

LARGEST_COUNT, LARGEST_FIGURE = 2**62, 1e39  # larger ones are mistakes, and would overflow


def measured(key: str, value: float) -> None:
    """A measured figure. It need not be finite, because a run may diverge."""
    if type(value) is int and abs(value) > LARGEST_COUNT:
        raise UserError(f"{key} is too large")


def spike(key: str, value: Sequence[float]) -> None:
    if len(value) != 3:
        raise UserError(f"{key} must have a step, a value and a limit")


def loss_scale(key: str, value: Sequence[float]) -> None:
    if len(value) != 2 or not (0 < value[0] <= 2.0**127 and 0 <= value[1] <= 2.0**24):  # as fp32 can hold them
        raise UserError(f"{key} must have a scale above 0 and a number of steps")


def random_bytes(key: str, value: Sequence[int]) -> None:
    if not all(type(each) is int and 0 <= each < 256 for each in value):  # 5056 of them: faster than a type for each
        raise UserError(f"{key} must have whole numbers from 0 to 255")


def wandb_name(key: str, value: str) -> None:
    if not WANDB_ID.fullmatch(value):  # it becomes part of file names
        raise UserError(f"{key} must have from 1 to 128 letters, digits, '-' and '_'")


def one_length(key: str, value: dict) -> None:
    if len(value["losses"]) != len(value["norms"]):
        raise UserError(f"{key} must have equal numbers of losses and norms")


Step = Annotated[int, Between(0, LARGEST_STEP)]
Count = Annotated[int, Between(0, LARGEST_COUNT)]
Total = Annotated[float, Between(0, LARGEST_FIGURE)]
Figure = Annotated[float, Between(-LARGEST_FIGURE, LARGEST_FIGURE)]  # always finite
Measured = Annotated[float, measured]


@dataclass(frozen=True)
class Interval:
    steps: Count
    loss_spikes: Count
    gradient_spikes: Count
    clipped: Count


@dataclass(frozen=True)
class SourceFigures:
    loss: Measured
    tokens: Count
    bpb: Measured | None = None
    bytes: Count | None = None
    nats: Measured | None = None


@dataclass(frozen=True)
class BestFigures:
    val: Measured
    train: Measured
    tokens: Count
    step: Step


@dataclass(frozen=True)
class HealthState:
    losses: list[Figure]
    norms: list[Figure]
    interval: Interval
    worst: dict[str, Annotated[list[Figure], spike]]
    learned: bool
    val: dict[str, SourceFigures]
    best: BestFigures | None
    active: dict[str, Step]


@dataclass(frozen=True)
class SavedData:
    """What is read of config.data but by a resumed run, which reads all of it as a configuration."""

    kind: str | None = None
    sources: dict[str, dict] | None = None
    sample_prompt: str | None = None


@dataclass(frozen=True)
class SavedConfig:
    """The groups of the configuration that commands look into. Those of a model are parsed when it is built."""

    data: SavedData | None = None


@dataclass(frozen=True)
class State:
    """A schema of the fields of state.json that are read. A resumed run needs all of them; a file may hold others."""

    step: Step
    tokens: Count
    config: SavedConfig
    flops: Total
    seconds: Total
    val_loss: Measured | None
    val_bpb: Measured | None
    best_bpb: Measured | None
    data: str
    loss_scale: Annotated[list[Figure], loss_scale]
    torch_random: Annotated[list, random_bytes]
    tokenizer: str
    health: Annotated[HealthState, one_length]
    compared_bpb: Measured | None
    val_tokens: Count | None
    evaluated_step: Step | None
    evaluations_since_best: Count
    ranks: Annotated[int, Between(1, 2**20)]
    wandb_id: Annotated[str, wandb_name] | None
    own_parts: dict[str, str | None]
    run: str
    groups: dict[str, str]
    planned_steps: Step
    follows_recipe: bool
    format_version: int
    left_auto: list[str]


NEEDED_TO_READ = ("step", "tokens", "config")


def check_state(path: Path, state: Any) -> None:
    """Raises Damaged if state.json lacks a field that every reader needs, or holds a field of a wrong type or range."""
    if not isinstance(state, dict):
        raise Damaged(f"{path} is damaged: its state.json lacks step, tokens and config")
    hints = key_types(State)
    check_fields(path, state, [name for name in hints if name in state or name in NEEDED_TO_READ])
    name = path.resolve().name
    if STEP_NAME.fullmatch(name) and int(name.removeprefix("step-")) != state["step"]:
        raise Damaged(f"{path} is damaged: its name and its state.json (step {state['step']}) disagree")


def check_resumable(path: Path, state: dict[str, Any]) -> None:
    """Raises Damaged if state.json, which `check_state` has accepted, lacks a field that a resumed run needs."""
    check_fields(path, state, list(key_types(State)))


def check_fields(path: Path, state: dict[str, Any], names: list[str]) -> None:
    hints = key_types(State)
    for name in names:
        if name not in state:
            raise Damaged(f"{path} is damaged: its state.json lacks {name}")
        try:
            check_type(hints[name], state[name], name)
        except UserError as error:
            raise Damaged(f"{path} is damaged: its state.json has an impossible {name}: {str(error)[:200]}") from None


def check_type(hint: Any, value: Any, where: str) -> None:
    """Raises UserError if `value`, as read from JSON, is not of the type `hint`. Nothing is converted.

    A dataclass stands for a JSON object, which may hold further fields. where: the dotted key, used in messages.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        check_type(arguments[0], value, where)
        for limit in arguments[1:]:
            limit(where, value)
    elif origin in (typing.Union, types.UnionType):
        if value is not None:
            check_type(next(each for each in arguments if each is not type(None)), value, where)
        elif type(None) not in arguments:
            raise UserError(f"{where} is null")
    elif dataclasses.is_dataclass(hint):
        check_object(hint, value, where)
    elif origin is list or origin is dict:
        if not isinstance(value, origin):
            raise UserError(f"{where}={shown(value)} is not a {origin.__name__}")
        for key, entry in value.items() if origin is dict else enumerate(value):
            check_type(arguments[-1], entry, f"{where}.{key}")
    elif not (type(value) is hint or (hint is float and type(value) is int)):
        raise UserError(f"{where}={shown(value)} is not allowed; allowed: {describe(hint)}")


def check_object(kind: type, value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise UserError(f"{where}={shown(value)} is not a JSON object")
    for field in dataclasses.fields(kind):
        if field.name in value:
            check_type(key_types(kind)[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING:
            raise UserError(f"{where}.{field.name} is missing")


def shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"({type(value).__name__} of {len(value)})"
    return repr(value) if not isinstance(value, int) or abs(value) < LARGEST_COUNT else "(a huge number)"
