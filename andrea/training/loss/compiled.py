"""Makes the loss module that training calls: wrapped for the ranks, and compiled before the first step."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn

from andrea.config import RunConfig, UserError
from andrea.runtime.compiling import compile_errors, compile_failure, configure_compiler
from andrea.training.health.attention import measures_every_step
from andrea.training.loss.micro_batch import MicroBatchLoss, Teachers
from andrea.training.parallel.strategy import Parallel
from andrea.training.records.console import Console


def reuses_training_graph(compile_: str, device: torch.device) -> bool:
    """Whether an evaluation runs with gradients enabled, as training does: torch.compile specialises code to that mode.

    On a GPU it has a graph of its own, which a few seconds of compiling make: in training's graph the loss has an
    approximate tanh, and the head's gradients are computed too.
    """
    return compile_ != "off" and device.type != "cuda"


def make_loss(
    parallel: Parallel,
    config: RunConfig,
    device: torch.device,
    console: Console,
    may_run_uncompiled: bool,
    teachers: Teachers | None = None,
) -> tuple[nn.Module, RunConfig]:
    """The module that computes the loss of a micro-batch, and the config with the `compile` setting that worked.

    Compiling happens here, so that it is not counted as training time. If compiling fails and may_run_uncompiled is
    true (compile was auto), the console says so and training continues uncompiled; otherwise raises UserError.
    """
    recompute = config.train.activation_checkpointing
    micro_loss = MicroBatchLoss(
        parallel.model, device, config.precision, measures_every_step(config.attention), recompute, teachers
    )
    loss = parallel.wrap(micro_loss, config.compile)
    if config.compile == "off":
        return loss, config
    configure_compiler(device)
    console.say("compiling the training step (up to a minute; the next start reuses the compiled code) …")
    clock = time.perf_counter()
    shape = (config.train.micro_batch, config.model.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    try:
        loss(tokens, targets)[0].backward()
        if not reuses_training_graph(config.compile, device):
            with torch.no_grad():
                loss(tokens, targets)
    except (*compile_errors(), OSError) as error:  # OSError: the cache of compiled code cannot be written
        reason = compile_failure(error)
        if not may_run_uncompiled:
            raise UserError(
                f"compile={config.compile}: torch.compile failed ({reason}); set compile=off, or compile=auto, which "
                f"trains without torch.compile if it fails"
            ) from error
        console.say(f"torch.compile failed; training continues without it: {reason}")
        parallel.uncompile(micro_loss)
        return loss, dataclasses.replace(config, compile="off")
    finally:
        parallel.zero_gradients()
    console.say(f"compiled in {time.perf_counter() - clock:.0f} s")
    return loss, config
