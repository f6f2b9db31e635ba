"""From a configuration to a run: each part is made by the module that owns it, then the trainer takes over."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch

from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig, Text
from andrea.model.size import flops_per_token
from andrea.runtime.device import choose_threads, keep_freed_memory, peak_flops
from andrea.text.corpus import open_corpus
from andrea.text.loader import Loader
from andrea.training.checkpoints import RunCheckpoints, checkpoint_facts
from andrea.training.evaluation import DrawLens, Evaluator
from andrea.training.health.health import make_health
from andrea.training.loss.compiled import make_loss
from andrea.training.optimizer.loss_scale import LossScale
from andrea.training.optimizer.optimizer import Optimizer
from andrea.training.parallel.make import make_model, make_parallel
from andrea.training.parallel.ranks import Ranks
from andrea.training.parallel.saver import make_saver
from andrea.training.parallel.watchdog import Watchdog
from andrea.training.planning.auto import resolve
from andrea.training.planning.machine import Machine
from andrea.training.planning.micro_batch import with_tried_micro_batch
from andrea.training.progress import Progress
from andrea.training.records.console import Console
from andrea.training.records.records import Records, open_loggers
from andrea.training.records.run_folder import new_run_folder, run_folder_locked, write_config
from andrea.training.resume import restore, run_folder_of, starting_weights
from andrea.training.step import TrainingStep
from andrea.training.stopping import StopRequests
from andrea.training.throughput import Throughput
from andrea.training.trainer import Trainer


def start(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    watchdog: Watchdog,
    draw_lens: DrawLens | None = None,
) -> int:
    """Train, from `checkpoint` where one is given; every rank calls it. Returns the exit code. Raises UserError.

    draw_lens: draws the page shown at each evaluation. It is passed in, because insight may not be imported here.
    """
    console = Console(config.steps, quiet=not ranks.is_rank_0)
    machine = Machine.of_rank(config.device, ranks)
    folder = run_folder_of(checkpoint) if checkpoint else ranks.from_rank_0(lambda: new_run_folder(config))
    corpus = ranks.rank_0_first(lambda: open_corpus(config.data, config.tokenizer, Path(config.data_dir), console.say))
    asked = dataclasses.replace(config, name=Text(folder.name))
    resolved = ranks.from_rank_0(lambda: resolve(asked, machine, corpus))
    for line in resolved.lines:
        console.say(line)
    set_up_process(resolved.config, machine.device)
    weights = ranks.rank_0_first(lambda: starting_weights(resolved.config, corpus, checkpoint))
    with contextlib.ExitStack() as held:
        ranks.from_rank_0(lambda: held.enter_context(run_folder_locked(folder, checkpoint, console)))
        console.say(f"run: {folder.resolve()}")

        watchdog.at(0, "building the model")
        config, device, tokenizer = resolved.config, machine.device, corpus.tokenizer
        model = make_model(config, tokenizer, weights, checkpoint is None)
        del weights
        parallel = make_parallel(resolved.sharing, config, ranks, device, model, tokenizer)
        if device.type == "cuda" and asked.train.micro_batch == "auto":
            config = with_tried_micro_batch(config, parallel, machine, console)
        watchdog.at(0, "compiling")
        loss, config = make_loss(parallel, config, device, console, may_run_uncompiled=asked.compile == "auto")
        optimizer = Optimizer(parallel, config.optimizer, bf16=config.precision == "bf16")
        scale = LossScale(device, active=config.precision == "fp16")
        saver = make_saver(folder, optimizer, tokenizer, config.train.keep, config.parallel.async_save)
        watchdog.at(0, "reading the checkpoint")
        progress = restore(checkpoint, saver, scale) if checkpoint else Progress()
        loader = Loader(corpus.sources, config.model.sequence_length, config.seed)

        ranks.from_rank_0(lambda: write_config(folder, config))
        facts = checkpoint_facts(config, corpus, ranks)
        loggers = open_loggers(config, folder, checkpoint, console, parallel, facts) if ranks.is_rank_0 else []
        records = Records(loggers, console, progress, watchdog)
        health = make_health(config, corpus, loader, checkpoint)
        stopping = StopRequests(config.train.max_minutes, device, console.waiting)
        step = TrainingStep(config, parallel, loss, optimizer, scale, loader, device, console)
        per_token = flops_per_token(config.model, config.attention, tokenizer.n_vocab)
        trainer = Trainer(
            config,
            step,
            progress,
            Evaluator(config, corpus, step, progress, health, records, draw_lens),
            RunCheckpoints(folder, saver, progress, scale, health, records, facts),
            records,
            stopping,
            Throughput(config.tokens_per_step, per_token, peak_flops(device), ranks.size),
        )
        code = 1
        try:
            code = trainer.train()
        finally:
            records.finish(code)
        return code


def set_up_process(config: RunConfig, device: torch.device) -> None:
    """Settings of torch and of the C library that hold for the whole process."""
    choose_threads(config.threads)
    if device.type == "cpu":
        keep_freed_memory()
    torch.use_deterministic_algorithms(bool(config.deterministic))
    torch.manual_seed(config.seed)
