"""The default configuration of each command, composed once for each choice of groups, and a tiny model of it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from andrea.api.command_line import CommandLine, compose, read
from andrea.config import (
    AttentionConfig,
    CompareConfig,
    DashboardConfig,
    LensConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    lay_over,
    parse,
)
from andrea.model import GPT, initialise

KINDS: dict[type, str] = {
    RunConfig: "train",
    SampleConfig: "sample",
    LensConfig: "lens",
    CompareConfig: "compare",
    DashboardConfig: "dashboard",
}


@functools.lru_cache(maxsize=200)
def composed(kind: type, groups: tuple[tuple[str, str], ...]) -> dict:
    return compose(KINDS[kind], CommandLine(dict(groups), {}))


def tiny_model(n_vocab: int, end_of_text: int, **changes: Any) -> GPT:
    words = ["model.d_model=16", "model.n_layer=2", "model.n_head=2", "model.d_mlp=32", "model.sequence_length=32"]
    values = lay_over(copy.deepcopy(composed(RunConfig, ())), read(RunConfig, words).values)
    model = GPT(
        parse(ModelConfig, values["model"] | changes, "model"),
        parse(AttentionConfig, values["attention"], "attention"),
        n_vocab,
        end_of_text,
    )
    initialise(model, torch.Generator().manual_seed(0))
    return model.eval().requires_grad_(False)
