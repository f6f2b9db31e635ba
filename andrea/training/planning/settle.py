"""Remembers which settings a user left `auto`, and chooses them again when the keys that they depend on have changed.

Checkpoints hold the chosen values, so that a run resumes with the same values. They also hold the list of the keys that
were left `auto`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig
from andrea.training.optimizer.schedule import may_change, rate_at, relength
from andrea.training.planning.auto import QUARTERS, with_intervals
from andrea.training.planning.time_budget import is_open
from andrea.training.progress import Progress

LENGTH = ("train.steps", "train.flops", "train.tokens_per_parameter")
INTERVALS = ("train.eval_every", "train.save_every")
DEPENDS_ON = {  # a key that may be auto -> the keys from which it is settled; a key stands after those it depends on
    "train.steps": LENGTH[1:],
    **dict.fromkeys(INTERVALS, LENGTH),
    "train.max_minutes": LENGTH,
    "precision": ("device",),
    "deterministic": ("device",),
    "threads": ("device",),
    "compile": (*LENGTH, "device"),
    "attention.implementation": ("device", "precision"),
    "train.micro_batch": ("device", "precision", "train.activation_checkpointing"),
    "optimizer.weight_decay": (),  # chosen once, when the run begins
    "tokenizer.vocab_size": (),
    "model.bigram_rows": (),
    "optimizer.muon_rows": (),
}
NOTICED_JUMP = 0.05  # of the peak learning rate


def keys_left_auto(
    settings: dict[str, Any], remembered: Collection[str] = (), typed: Collection[str] = ()
) -> list[str]:
    """The keys of `settings` (dotted) that are `auto`, and the remembered keys that nobody has typed since."""
    return sorted({key for key, value in settings.items() if value == "auto"} | set(remembered) - set(typed))


def remembered_auto(checkpoint: Checkpoint) -> list[str]:
    """The keys that the user of the checkpoint's run left `auto`."""
    return [key for key in checkpoint.state["left_auto"] if key in DEPENDS_ON]


def settle_again(
    after: dict[str, Any], changed: Collection[str], left_auto: Collection[str], typed: Collection[str]
) -> dict[str, Any]:
    """The settings of `after` (dotted) that become `auto` or null, because keys that they depend on have changed.

    changed: the keys that differ from the saved ones. typed: the keys whose value was typed.
    """
    again: dict[str, Any] = {}
    lengths = [key for key in LENGTH if key in changed and key in typed]
    if lengths:  # two of them would contradict each other
        again |= {key: None for key in LENGTH[1:] if key not in typed and after.get(key) is not None}
    for key, causes in DEPENDS_ON.items():
        settled = key in left_auto and key not in typed and after.get(key) != "auto"
        if settled and any(cause in changed or cause in again for cause in causes):
            again[key] = "auto"
    return again


def as_planned(config: RunConfig, left_auto: Collection[str], steps: int, evaluations: int = QUARTERS) -> RunConfig:
    """`config` with a length of `steps` steps, and with the intervals that were left `auto` settled for this length."""
    if steps == config.steps:
        return config
    intervals = {key.split(".")[1]: "auto" for key in INTERVALS if key in left_auto}
    train = dataclasses.replace(config.train, steps=steps, **intervals)
    assert isinstance(train.micro_batch, int), "auto is resolved before training"
    config = dataclasses.replace(config, train=train)
    return dataclasses.replace(config, train=with_intervals(config, train.micro_batch, evaluations))


def settled_intervals(config: RunConfig) -> str:
    """The intervals that are `auto`, with the values that they will have; empty if there are none."""
    settled = with_intervals(config, micro_batch=1)
    names = [key.split(".")[1] for key in INTERVALS]
    return ", ".join(f"train.{n}={getattr(settled, n)}" for n in names if getattr(config.train, n) == "auto")


def asked_length(config: RunConfig, left_auto: Collection[str]) -> tuple[float | None, ...]:
    """The settings by which the user gave the run its length."""
    steps = None if "train.steps" in left_auto else config.steps
    return steps, config.train.flops, config.train.tokens_per_parameter


def with_length(
    progress: Progress, saved: RunConfig, saved_auto: Collection[str], config: RunConfig, left_auto: Collection[str]
) -> Progress:
    """The progress of a resumed run with its length: the planned length, unless the user now asks for another length.

    saved_auto, left_auto: the keys that were left `auto` in the checkpoint's run, and in this process.
    """
    step, planned, optimizer = progress.step, progress.planned_steps, saved.optimizer
    if saved.train.max_minutes is not None and is_open(step, planned, optimizer):  # planned is only the limit of then
        steps = relength(step, planned, 1, optimizer) if may_change(step, planned, optimizer) else step + 1
        progress = dataclasses.replace(progress, planned_steps=max(config.steps, steps))
    if asked_length(saved, saved_auto) == asked_length(config, left_auto) or progress.planned_steps == config.steps:
        return progress
    return dataclasses.replace(progress, planned_steps=config.steps)


def describe_rate(before: Progress, saved: RunConfig, now: Progress, config: RunConfig) -> str | None:
    """A line on the learning rate's jump when a run goes on with another number of steps; None without a jump.

    before, now: the progress as saved, and with the length of this process.
    """
    step, steps = now.step, now.planned_steps
    if steps == before.planned_steps or not 0 < step < min(steps, before.planned_steps + 1):
        return None
    last, after = rate_at(step - 1, before.planned_steps, saved.optimizer), rate_at(step, steps, config.optimizer)
    if abs(after - last) < NOTICED_JUMP:
        return None
    return (
        f"learning rate: jumps from {last:.0%} to {after:.0%} of its peak, the value of "
        f"optimizer.schedule={config.optimizer.schedule} at step {step + 1} of {steps}"
    )
