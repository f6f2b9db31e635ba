"""Command lines of every command: plausible values, hostile values, unknown keys."""

from __future__ import annotations

import copy
import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from andrea.api.command_line import compose, read
from andrea.cli.commands import to_key_value
from andrea.cli.sweep import split
from andrea.config import CompareConfig, DashboardConfig, LensConfig, RunConfig, SampleConfig, lay_over, parse
from andrea.training.planning import dry_run
from andrea.training.planning.dry_run import describe as describe_plan
from andrea.training.planning.length import with_length_and_name
from fuzzing.composed import KINDS, composed
from fuzzing.raw_values import CHOICES, NASTY, any_text, numbers, wild_text
from fuzzing.trial import Handler


def known_keys(kind: type, prefix: str = "") -> list[tuple[str, Any]]:
    """Every dotted key with its type."""
    found: list[tuple[str, Any]] = []
    for name, hint in typing.get_type_hints(kind).items():
        found.append((prefix + name, hint))
        if is_dataclass(hint):
            found += known_keys(hint, f"{prefix}{name}.")
    return found


def plausible(hint: Any) -> SearchStrategy[str]:
    """What a user might type for a key of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from([str(argument) for argument in arguments])
    if arguments and origin not in (list, dict):
        return st.one_of([plausible(argument) for argument in arguments])
    if hint is int:
        return st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64, 100, 256, 1024, 10**6, 10**9, 10**13, 10**18]).map(str)
    if hint is float:
        return st.one_of(
            st.sampled_from(["0.5", "1e-3", "1", "0.9", "100", "1e15", "1e30", "1e300"]), st.floats().map(str)
        )
    if hint is bool:
        return st.sampled_from(["true", "false"])
    if hint is type(None):
        return st.just("null")
    if origin is list:
        return st.sampled_from(["[a, b]", "a", "[]", "3.7"])
    if origin is dict:
        return st.sampled_from(["{code: {kind: pystdlib}, notes: {kind: text, path: notes/, weight: 0.3}}", "{}"])
    if is_dataclass(hint):
        return st.sampled_from(CHOICES)
    return st.one_of(st.sampled_from(["notes", "runs/a", "out.html", "~/x"]), any_text)


def word_of(kind: type) -> SearchStrategy[str]:
    typed = [
        st.builds(
            lambda value, key=key: f"{key}={value}",
            st.one_of(plausible(hint), plausible(hint), st.sampled_from(NASTY), numbers.map(str), wild_text),
        )
        for key, hint in known_keys(kind)
    ]
    known = st.one_of(typed)
    strange_key = st.one_of(
        st.sampled_from(
            [
                "hydra.run.dir",
                "hydra/launcher",
                "+a",
                "~model",
                "++",
                "model.",
                ".model",
                "data.sources.a.b.c",
                "train.steps.x",
                "model@x",
                "_target_",
                "defaults",
                "--config-dir",
                "__class__",
                "data.sources.a.kind",
            ]
        ),
        any_text,
        known.map(lambda word: word.partition("=")[0][:-1]),
    )
    strange = st.one_of(st.builds(lambda key, value: f"{key}={value}", strange_key, wild_text), wild_text)
    return st.one_of([known] * 9 + [strange])


configurations = st.one_of(
    [
        st.tuples(st.just(kind), st.lists(word_of(kind), min_size=1, max_size=5), st.integers(0, 99))
        for kind in (RunConfig, RunConfig, RunConfig, SampleConfig, LensConfig, CompareConfig, DashboardConfig)
    ]
)


def is_small(run: RunConfig) -> bool:
    """Whether planning is cheap: a large model takes time for reasons that have nothing to do with its input."""
    sizes = (run.model.d_model, run.model.d_mlp, run.model.sequence_length)
    return run.model.n_layer <= 8 and max(sizes) <= 4096 and run.sequences_per_step <= 4096


def make_configurations(folder: Path) -> Handler:
    dry_run.MOST_TRIAL_FLOPS = {"cpu": 0.0, "gpu": 0.0}  # no trial steps: their time does not depend on an input's form
    describe_plan(parse(RunConfig, copy.deepcopy(composed(RunConfig, ()))))  # imports once, outside of any input's time

    def handle(tried: tuple[type, list[str], int]) -> None:
        kind, words, number = tried
        if kind is RunConfig and number % 10 == 0:
            split(words)
        if kind is CompareConfig:
            words = to_key_value(words, positional="runs")
        line = read(kind, words)
        if number == 1:
            plain = compose(KINDS[kind], line)
        else:
            plain = lay_over(copy.deepcopy(composed(kind, tuple(sorted(line.groups.items())))), line.values)
        run = parse(kind, plain)
        if kind is RunConfig and is_small(run):
            run = with_length_and_name(run)
            if 1 < number < 6:
                describe_plan(run)

    return handle
