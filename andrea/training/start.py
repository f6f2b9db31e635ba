"""Checks what needs the text, assembles the parts of a run from its configuration, and starts the trainer."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.find_and_prune import mark_and_prune, set_aside_after
from andrea.checkpoint.model import load_final_weights
from andrea.config import PathText, RunConfig, Text, UserError
from andrea.model import GPT, initialise
from andrea.model.lora import initialise_factors, train_vocabulary
from andrea.model.size import flops_per_token
from andrea.model.transfer import Transfer
from andrea.runtime import torchrun
from andrea.runtime.compiling import compile_errors, compile_failure, configure_compiler
from andrea.runtime.device import WEIGHT_DTYPE, choose_threads, keep_freed_memory, peak_flops, set_determinism
from andrea.text.corpus import Corpus, open_corpus
from andrea.text.loader import Loader
from andrea.text.tokenizer import Tokenizer
from andrea.training.evaluation import Evaluator, Lens, check_sample_prompt, measures_every_step
from andrea.training.expected.curves import ExpectedCurves
from andrea.training.health.health import make_health
from andrea.training.loss.loss import MicroBatchLoss, load_teachers
from andrea.training.objectives.dpo import DPO
from andrea.training.objectives.grpo import GRPO
from andrea.training.objectives.objective import Objective
from andrea.training.optimizer import LossScale, Optimizer
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.ranks import DataParallel, Parallel, Ranks, Watchdog, reuses_training_graph
from andrea.training.parallel.saver import Saver, ShardedSaver
from andrea.training.planning.length import FORWARD_SHARE, TimeBudget, describe_length
from andrea.training.planning.memory import Machine, with_tried_micro_batch
from andrea.training.planning.plan import Plan, Situation, make_plan, with_choices
from andrea.training.records import Logger, Progress
from andrea.training.records.console import Console
from andrea.training.records.records import Records, check_loggers, open_loggers
from andrea.training.records.run_folder import folder_to_write, mark, run_folder_locked, write_config
from andrea.training.resume import (
    check_data,
    is_done,
    restore,
    resumed_progress,
    saved_run,
    show_done,
    source_of_weights,
    without_run,
)
from andrea.training.step import TrainingStep
from andrea.training.trainer import (
    RunCheckpoints,
    StopRequests,
    Throughput,
    Trainer,
    advising_to_continue,
    checkpoint_facts,
)

MakeLogger = Callable[[Path], Logger]  # run folder -> logger


@dataclass(frozen=True)
class RunSetup:
    """The inputs from which a run is built. started: time.monotonic() at the beginning of the command."""

    started: float
    machine: Machine
    corpus: Corpus
    checkpoint: Checkpoint | None
    folder: Path
    console: Console
    watchdog: Watchdog
    lens: Lens
    run_page: MakeLogger
    objective: Objective | None  # None: the next token


def start(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    watchdog: Watchdog,
    lens: Lens,
    run_page: MakeLogger,
    left_auto: Sequence[str],
    groups: Mapping[str, str],
    started: float,
) -> tuple[int, Path]:
    """Train a new run, or continue from `checkpoint`, on every rank. Returns exit code and run folder. Raises UserError.

    run_page: makes the logger that writes the page of the run's folder. It is passed in like `lens`, because training may
    not import insight. left_auto, groups: see Plan. started: time.monotonic() at the beginning of the
    command, from which train.max_minutes counts.
    """
    console = Console(config.steps, quiet=not ranks.is_rank_0)
    ranks.from_rank_0(lambda: check_loggers(config.logger))
    machine = Machine.of_rank(config.device, ranks)
    folder, holds_checkpoint = ranks.from_rank_0(lambda: folder_to_write(config, checkpoint))
    if checkpoint and not holds_checkpoint:
        console.say(
            f"{checkpoint.path} is not in the folder of this run, and stays as it is; the run continues in {folder}"
        )
        checkpoint = without_run(checkpoint)
    tokenizer = config.tokenizer
    if checkpoint and tokenizer.path:  # a resumed run has its own copy of a tokenizer that was given by a path
        tokenizer = dataclasses.replace(tokenizer, path=PathText(checkpoint.path))
    data, data_dir, pairs = config.data, Path(config.data_dir), config.objective.kind == "dpo"
    corpus = ranks.rank_0_first(lambda: open_corpus(data, tokenizer, data_dir, console.say, pairs))
    asked = dataclasses.replace(config, name=Text(folder.name))
    ranks.from_rank_0(lambda: check_sample_prompt(asked, corpus.tokenizer))
    planned_steps = None
    if checkpoint:
        planned_steps = ranks.from_rank_0(lambda: resumed_length(asked, checkpoint, left_auto, machine, corpus))
        if ranks.from_rank_0(lambda: is_done(checkpoint, planned_steps)):  # `auto` is a length that its text has ended
            ranks.from_rank_0(lambda: show_done(checkpoint, planned_steps))
            return 0, folder
    plan = ranks.from_rank_0(lambda: make_plan(asked, left_auto, dict(groups), planned_steps, machine, corpus))
    console.say(*plan.lines)
    choose_threads(plan.config.threads)  # this and the next lines hold for the whole process
    if machine.device.type == "cpu":
        keep_freed_memory()
    set_determinism(bool(plan.config.deterministic))
    torch.manual_seed(plan.config.seed)
    source = None
    if checkpoint:
        ranks.rank_0_first(lambda: check_data(checkpoint, corpus))
    elif config.init_from:
        source = ranks.rank_0_first(lambda: source_of_weights(plan.config, corpus.tokenizer))
        console.say(f"weights: {config.init_from} (init_from)")
    teachers = ranks.rank_0_first(lambda: load_teachers(plan.config, corpus.tokenizer, machine.device))
    objective = make_objective(plan, corpus, machine, teachers)
    if objective is not None:
        console.say(*objective.lines)
        teachers = []  # they are its reference
    if teachers:
        console.say(f"distillation: half of each target from the mean of {len(teachers)} teachers")
    with contextlib.ExitStack() as held:
        ranks.from_rank_0(lambda: held.enter_context(run_folder_locked(folder)))
        console.say(f"run: {folder.resolve()}")
        setup = RunSetup(started, machine, corpus, checkpoint, folder, console, watchdog, lens, run_page, objective)
        plan, parallel, loss = make_model_and_loss(setup, plan, source, teachers)
        trainer = make_trainer(setup, plan, parallel, loss)
        code = 1
        with advising_to_continue(folder, plan.config):
            try:
                code = trainer.train()
            finally:
                trainer.records.finish(code)
        return code, folder


def make_objective(plan: Plan, corpus: Corpus, machine: Machine, teachers: Sequence[GPT]) -> Objective | None:
    """None: the next token. Raises UserError for what the objective cannot work with."""
    config, kind = plan.config, plan.config.objective.kind
    if kind == "next_token":
        return None
    reference = teachers[0] if teachers else None
    if kind == "grpo" and plan.sharing == "fsdp":
        raise UserError("objective=grpo draws answers with the whole model on each rank; set parallel=ddp")
    if config.objective.has_reference and reference is None:
        raise UserError(f"objective={kind} compares with a reference; set init_from=… to name it")
    if kind == "grpo":
        return GRPO(config, corpus, machine.ranks, reference)
    return DPO(config.objective.beta, reference, corpus.tokenizer, machine.device)


def make_model_and_loss(
    setup: RunSetup, plan: Plan, source: Checkpoint | None, teachers: Sequence[GPT]
) -> tuple[Plan, Parallel, nn.Module]:
    """The model shared among the ranks, its compiled loss, and the plan with the micro-batch and `compile` that worked."""
    config, device, tokenizer = plan.config, setup.machine.device, setup.corpus.tokenizer
    setup.watchdog.at(0, "building the model")
    model = make_model(config, tokenizer, source, fresh=setup.checkpoint is None)
    parallel = make_parallel(plan.sharing, config, setup.machine.ranks, device, model, tokenizer)
    micro_loss = micro_batch_loss(parallel.model, config, device, teachers, setup.objective)
    if device.type == "cuda" and plan.is_micro_batch_chosen:
        config = with_tried_micro_batch(config, parallel, setup.machine, setup.console, micro_loss)
    setup.watchdog.at(0, "compiling")
    may_run_uncompiled = "compile" in plan.left_auto
    loss, config = make_loss(parallel, micro_loss, config, device, setup.console, may_run_uncompiled)
    return dataclasses.replace(plan, config=config), parallel, loss


def make_model(config: RunConfig, tokenizer: Tokenizer, source: Checkpoint | None, fresh: bool) -> GPT:
    """The model on the CPU: of `source`, new if `fresh`, otherwise meaningless until a checkpoint is loaded."""
    model = blank_model(config, tokenizer)
    if source is not None:
        load_final_weights(model, source, n_added=tokenizer.n_vocab - source.tokenizer().n_vocab)
        initialise_factors(model, torch.Generator().manual_seed(config.seed))
    elif fresh:
        initialise(model, torch.Generator().manual_seed(config.seed), Transfer.of(config.model, config.optimizer))
    return model


def blank_model(config: RunConfig, tokenizer: Tokenizer) -> GPT:
    model = GPT(config.model, config.attention, tokenizer.n_vocab, tokenizer.end_of_text)
    if config.model.lora_rank and tokenizer.special:  # as in resume.check_headers
        train_vocabulary(model)
    return model


def make_parallel(
    sharing: str, config: RunConfig, ranks: Ranks, device: torch.device, model: GPT, tokenizer: Tokenizer
) -> Parallel:
    """Shares the model among the ranks. sharing: none, ddp or fsdp."""
    if sharing == "fsdp":
        dtype = WEIGHT_DTYPE[config.precision]
        return FullySharded(model, ranks, config.parallel, device, dtype, lambda: blank_model(config, tokenizer))
    model.to(device)
    return DataParallel(model, ranks) if ranks.size > 1 else Parallel(model)


def micro_batch_loss(
    model: GPT,
    config: RunConfig,
    device: torch.device,
    teachers: Sequence[GPT] = (),
    objective: Objective | None = None,
) -> MicroBatchLoss:
    observing, recompute = measures_every_step(config.attention), config.train.activation_checkpointing
    return MicroBatchLoss(model, device, config.precision, observing, recompute, teachers, objective)


def make_loss(
    parallel: Parallel,
    micro_loss: MicroBatchLoss,
    config: RunConfig,
    device: torch.device,
    console: Console,
    may_run_uncompiled: bool,
) -> tuple[nn.Module, RunConfig]:
    """The module that the training step calls for `micro_loss`, and the config with the `compile` setting that worked.

    Compiling happens here, so that it is not counted as training time. If compiling fails and may_run_uncompiled is
    true (compile was auto), the console says so and training continues uncompiled; otherwise raises UserError.
    """
    loss = parallel.wrap(micro_loss, config.compile)
    if config.compile == "off":
        return loss, config
    configure_compiler(device)
    console.say("compiling the training step (up to a minute; the next start reuses the compiled code) …")
    clock = time.perf_counter()
    shape = (config.train.micro_batch, config.model.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    try:
        loss(tokens, targets)[0].sum().backward()
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


def make_trainer(setup: RunSetup, plan: Plan, parallel: Parallel, loss: nn.Module) -> Trainer:
    """The trainer with all its parts, in the state of the checkpoint if the run is resumed."""
    config, device, folder = plan.config, setup.machine.device, setup.folder
    corpus, checkpoint, console = setup.corpus, setup.checkpoint, setup.console
    optimizer = Optimizer(parallel, config.optimizer, bf16=config.precision == "bf16")
    scale = LossScale(device, active=config.precision == "fp16")
    saver = (ShardedSaver if parallel.is_sharded else Saver)(folder, optimizer, corpus.tokenizer, config.train.keep)
    setup.watchdog.at(0, "reading the checkpoint")
    if checkpoint:
        restore(checkpoint, saver, scale)
    progress = progress_at_start(config, checkpoint, plan.left_auto)
    console.steps = progress.planned_steps
    budget = make_time_budget(plan, corpus, setup.started)
    if length := describe_length(progress, config, budget):
        console.say(length)
    if budget:
        console.seconds_left = budget.seconds_left
    loader = Loader(corpus.sources, config.model.sequence_length, config.seed, corpus.tokenizer.end_of_text)
    console.say(*loader.lines)

    ranks = parallel.ranks
    for path in ranks.from_rank_0(lambda: set_aside_after(folder, checkpoint.step) if checkpoint else []):
        console.say(f"the run continues from an earlier step; a checkpoint after that step was renamed to {path}")
    best = progress.best_bpb
    progress.best_bpb = ranks.from_rank_0(lambda: mark_and_prune(folder, config.train.keep, best))  # on the disk
    torchrun.record_run_folder(folder)
    known_id, resumed = (checkpoint.state.get("run"), checkpoint.path) if checkpoint else (None, None)
    run_id = ranks.from_rank_0(lambda: mark(folder, known_id, config.init_from, resumed))
    facts = checkpoint_facts(plan, corpus, ranks, run_id)
    records = Records([], console, folder, progress, setup.watchdog)
    if ranks.is_rank_0:
        open_loggers(records, config, checkpoint, parallel, facts, setup.run_page)
    health = make_health(config, corpus, loader, checkpoint, plan.expected_epochs)
    step = TrainingStep(config, parallel, loss, optimizer, scale, loader, device, console, setup.objective)
    per_token = flops_per_token(config.model, config.attention, corpus.tokenizer.n_vocab)
    expected = ExpectedCurves.of(config)
    trainer = Trainer(
        plan,
        step,
        Evaluator(corpus, step, health, records, setup.lens, expected, plan.is_judged_on_a_part, budget),
        RunCheckpoints(saver, scale, health, records, facts),
        records,
        StopRequests(budget, device, console.waiting),
        Throughput(config.tokens_per_step, per_token, peak_flops(device), ranks.size),
    )
    ranks.from_rank_0(lambda: write_config(folder, trainer.planned))
    return trainer


def make_time_budget(plan: Plan, corpus: Corpus, started: float) -> TimeBudget | None:
    """None without train.max_minutes."""
    config = plan.config
    if config.max_minutes is None:
        return None
    held_out = sum(len(source.val) for source in corpus.sources)
    return TimeBudget(
        config.max_minutes,
        started,
        FORWARD_SHARE * held_out / config.tokens_per_step,
        plan.most_steps,
        is_limit="train.max_minutes" not in plan.left_auto,
    )


def progress_at_start(config: RunConfig, checkpoint: Checkpoint | None, left_auto: Sequence[str]) -> Progress:
    if checkpoint is None:
        return Progress(planned_steps=config.steps, follows_recipe=not config.init_from)
    return resumed_progress(checkpoint, saved_run(checkpoint, config), config, left_auto)


def resumed_length(
    asked: RunConfig, checkpoint: Checkpoint, left_auto: Sequence[str], machine: Machine, corpus: Corpus
) -> int:
    """The steps of a resumed run as planned now, which the text decides if they are set to `auto`."""
    known = with_choices(asked, left_auto, Situation(machine, corpus), ("train.max_minutes", "train.steps"))
    return progress_at_start(known, checkpoint, left_auto).planned_steps
