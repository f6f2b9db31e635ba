"""Makes the model of a run, and the `Parallel` that shares it among the ranks."""

from __future__ import annotations

import torch

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import load_results
from andrea.config import RunConfig
from andrea.model import GPT, initialise
from andrea.model.transfer import Transfer
from andrea.runtime.device import WEIGHT_DTYPE
from andrea.text.tokenizer import Tokenizer
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.strategy import DataParallel, Parallel, Ranks, SingleProcess


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
    return DataParallel(model, ranks) if ranks.size > 1 else SingleProcess(model)
