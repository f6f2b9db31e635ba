"""Makes the model of a run, the `Parallel` that shares it among the ranks, and its loss, compiled before the first step."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import load_results
from andrea.config import RunConfig, UserError
from andrea.model import GPT, initialise
from andrea.model.transfer import Transfer
from andrea.runtime.compiling import compile_errors, compile_failure, configure_compiler
from andrea.runtime.device import WEIGHT_DTYPE
from andrea.text.tokenizer import Tokenizer
from andrea.training.health.attention import measures_every_step
from andrea.training.loss.micro_batch import MicroBatchLoss, Teachers
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.strategy import DataParallel, Parallel, Ranks
from andrea.training.records.console import Console


def make_model(config: RunConfig, tokenizer: Tokenizer, source: Checkpoint | None, fresh: bool) -> GPT:
    """The model on the CPU, with the weights of `source` if given, else newly initialised if `fresh`.

    Otherwise its weights are meaningless until a checkpoint is loaded.
    """
    model = blank_model(config, tokenizer)
    if source is not None:
        load_results(model, source)
    elif fresh:
        initialise(model, torch.Generator().manual_seed(config.seed), Transfer.of(config.model, config.optimizer))
    return model


def blank_model(config: RunConfig, tokenizer: Tokenizer) -> GPT:
    return GPT(config.model, config.attention, tokenizer.n_vocab, tokenizer.end_of_text)


def make_parallel(
    sharing: str, config: RunConfig, ranks: Ranks, device: torch.device, model: GPT, tokenizer: Tokenizer
) -> Parallel:
    """Shares the model among the ranks. sharing: none, ddp or fsdp."""
    if sharing == "fsdp":
        dtype = WEIGHT_DTYPE[config.precision]
        return FullySharded(model, ranks, config.parallel, device, dtype, lambda: blank_model(config, tokenizer))
    model.to(device)
    return DataParallel(model, ranks) if ranks.size > 1 else Parallel(model)


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
