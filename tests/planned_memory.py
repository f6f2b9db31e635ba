"""The memory plan of a model and a few settings, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from andrea.api.command_line import configure
from andrea.config import AttentionConfig, ModelConfig, PathText, RunConfig
from andrea.training.planning.memory import Memory, Placement, memory_of


def plan_memory(
    model: ModelConfig,
    attention: AttentionConfig,
    n_vocab: int,
    *,
    micro_batch: int,
    precision: str,
    optimizer: str,
    recompute: bool = False,
    compiled: bool = False,
    on_cpu: bool = False,
    ranks: int = 1,
    sharded: bool = False,
    n_teacher: int = 0,
) -> Memory:
    run = configure(RunConfig, "train", [])
    run = replace(
        run,
        model=model,
        attention=attention,
        compile="on" if compiled else "off",
        optimizer=replace(run.optimizer, kind=optimizer),
        train=replace(run.train, activation_checkpointing=recompute, teachers=[PathText("teacher")] * n_teacher),
    )
    place = Placement(torch.device("cpu" if on_cpu else "cuda"), precision, ranks, sharded)
    return memory_of(run, n_vocab, micro_batch, place)
