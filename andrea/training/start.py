"""From a configuration to a run: prepare the data, settle what was left `auto`, build everything, train."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from andrea.checkpoint import (
    Checkpoint,
    checkpoints_of,
    read_checkpoint,
)
from andrea.checkpoint.keep import set_aside_after
from andrea.config import RunConfig, Text, UserError, to_plain
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT, initialise
from andrea.model.size import flops_per_token
from andrea.model.transfer import Transfer
from andrea.runtime.compiling import compile_errors, configure_compiler
from andrea.runtime.device import (
    choose_threads,
    keep_freed_memory,
    peak_flops,
    weight_dtype,
)
from andrea.runtime.files import Locked, exclusive_lock, remove_unfinished, replace_text, storing
from andrea.text.corpus import Corpus, open_corpus
from andrea.text.loader import Loader
from andrea.text.tokenizer import Tokenizer
from andrea.training.float8 import to_float8
from andrea.training.health.health import make_health
from andrea.training.loss.micro_batch import MicroBatchLoss
from andrea.training.optimizer.loss_scale import LossScale
from andrea.training.optimizer.optimizer import Optimizer
from andrea.training.parallel.ddp import DataParallel
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.ranks import Ranks
from andrea.training.parallel.saver import Saver, make_saver
from andrea.training.parallel.strategy import Parallel, SingleProcess
from andrea.training.parallel.watchdog import Watchdog
from andrea.training.planning.micro_batch import with_tried_micro_batch
from andrea.training.planning.settle import choose_device_of_rank, measures_every_step, room_of_a_rank, settle
from andrea.training.records.console import Console
from andrea.training.records.logger import Logger
from andrea.training.records.run_folder import RunFolder
from andrea.training.records.weights_and_biases import Wandb, choose_wandb_mode
from andrea.training.resume import run_folder_of
from andrea.training.trainer import Progress, Trainer

SAMPLE_TEMPERATURE = 0.8  # of the samples written during training
LENS_TOKENS = 40  # of held-out text, drawn at each evaluation where no prompt is given
WriteSamples = Callable[[GPT, int, int], list[dict[str, str]]]
Observe = Callable[[GPT, Tokenizer, str], str]  # model, tokenizer, prompt -> HTML


def start(
    run: RunConfig, checkpoint: Checkpoint | None, ranks: Ranks, watchdog: Watchdog, observe: Observe | None = None
) -> int:
    """Train `run`, from `checkpoint` where one is given; returns the process's exit code. Raises UserError.

    Every rank calls it. observe: draws the page of a fixed prompt at each evaluation; what rooms above this one show, the
    script hands over.
    """
    console = Console(run.steps, quiet=not ranks.is_rank_0)
    device = ranks.rank_0_first(lambda: choose_device_of_rank(run.device, ranks))
    folder = run_folder_of(checkpoint) if checkpoint else ranks.from_rank_0(lambda: new_run_folder(run))
    may_do_without_compile = run.compile == "auto"
    corpus = ranks.rank_0_first(lambda: open_corpus(run.data, run.tokenizer, Path(run.data_dir), console.say))
    room = room_of_a_rank(device, ranks)
    tries_micro_batch = device.type == "cuda" and run.train.micro_batch == "auto"
    named = dataclasses.replace(run, name=Text(folder.name))
    run, parallel_kind = ranks.from_rank_0(lambda: settle(named, device, ranks, room, corpus, console))
    choose_threads(run.threads)
    if device.type == "cpu":
        keep_freed_memory()
    torch.use_deterministic_algorithms(bool(run.deterministic))
    weights = ranks.rank_0_first(lambda: read_weights(run, corpus, checkpoint))
    with contextlib.ExitStack() as held:
        ranks.from_rank_0(lambda: held.enter_context(run_folder_held(folder, checkpoint, console)) and None)
        console.say(f"run: {folder.resolve()}")

        watchdog.at(0, "building the model")
        torch.manual_seed(run.seed)
        model = make_model(run, corpus)
        if weights is None and checkpoint is None:
            initialise(model, torch.Generator().manual_seed(run.seed), Transfer.of(run.model, run.optimizer))
        elif weights is not None:
            model.load_state_dict(weights)
        del weights
        parallel = make_parallel(parallel_kind, run, ranks, model, corpus, device)
        if tries_micro_batch:
            run = with_tried_micro_batch(run, parallel, device, room, console)
        watchdog.at(0, "compiling")
        loss, run = make_loss(parallel, run, device, console, may_do_without_compile)
        optimizer = Optimizer(parallel, run.optimizer, bf16=run.precision == "bf16")
        scale = LossScale(device, active=run.precision == "fp16")
        saver = make_saver(folder, optimizer, corpus.tokenizer, run.train.keep, run.parallel.async_save)
        watchdog.at(0, "reading the checkpoint")
        progress = restore(checkpoint, saver, scale) if checkpoint else Progress()

        ranks.from_rank_0(lambda: write_config(folder, run))
        per_token = flops_per_token(run.model, run.attention, corpus.tokenizer.n_vocab)
        derived = {
            "parameters": sum(shape.numel() for shape in parallel.shapes.values()),
            "flops_per_token": per_token,
            "tokens_per_step": run.tokens_per_step,
            "tokenizer_identity": corpus.tokenizer.identity,
            "data_fingerprint": corpus.fingerprint,
            "ranks": ranks.size,
        }
        loggers, run_id = open_loggers(run, folder, checkpoint, console, derived) if ranks.is_rank_0 else ([], None)
        facts = {"config": to_plain(run), "data": corpus.fingerprint, "wandb_id": run_id, "ranks": ranks.size}

        loader = Loader(corpus.sources, run.model.sequence_length, run.seed)
        health = make_health(run, corpus, loader, checkpoint)
        trainer = Trainer(
            run=run, folder=folder, corpus=corpus, parallel=parallel, loss_sum=loss, optimizer=optimizer, scale=scale,
            device=device, precision=run.precision, micro_batch=run.train.micro_batch, flops_per_token=per_token,
            peak_flops=peak_flops(device), progress=progress, saver=saver, loggers=loggers, console=console,
            watchdog=watchdog, write_samples=sampler(run, corpus), health=health, draw=drawer(run, corpus, observe),
            facts=facts,
        )  # fmt: skip
        code = 1
        try:
            code = trainer.train()
        finally:
            for logger in loggers:
                logger.finish(code)
        return code


# ---------------------------------------------------------------------------------------- the model and who keeps it


def make_parallel(
    kind: str, run: RunConfig, ranks: Ranks, model: GPT, corpus: Corpus, device: torch.device
) -> Parallel:
    """kind: none, ddp, fsdp."""
    if kind == "fsdp":
        dtype = weight_dtype(run.precision)
        return FullySharded(model, ranks, run.parallel, device, dtype, lambda: make_model(run, corpus))
    model.to(device)
    return DataParallel(model, ranks) if ranks.size > 1 else SingleProcess(model)


def make_model(run: RunConfig, corpus: Corpus) -> GPT:
    model = GPT(run.model, run.attention, corpus.tokenizer.n_vocab, corpus.tokenizer.end_of_text)
    if run.float8:
        to_float8(model.blocks)
    return model


def make_loss(
    parallel: Parallel, run: RunConfig, device: torch.device, console: Console, may_do_without: bool
) -> tuple[nn.Module, RunConfig]:
    """The loss of a micro-batch as training calls it: over all ranks, and compiled when asked, now, before the clock starts.

    A machine that cannot compile trains without where compile was left `auto`, and is told so; the choice is the run's.
    """
    recompute = run.train.activation_checkpointing
    micro = MicroBatchLoss(parallel.model, device, run.precision, measures_every_step(run), recompute)
    loss = parallel.wrap(micro, run.compile)
    if run.compile == "off":
        return loss, run
    configure_compiler(device)
    console.say("compiling the training step, up to a minute (kept for the next start) …")
    clock = time.perf_counter()
    shape = (run.train.micro_batch, run.model.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    try:
        loss(tokens, targets)[0].backward()
    except compile_errors() as error:
        if not may_do_without:
            raise
        console.say(f"torch.compile failed here, training goes on without it: {str(error).strip().splitlines()[0]}")
        parallel.uncompile(micro)
        return loss, dataclasses.replace(run, compile="off")
    finally:
        parallel.zero_gradients()
    console.say(f"compiled in {time.perf_counter() - clock:.0f} s")
    return loss, run


# ---------------------------------------------------------------------------------------------- what is there already


def read_weights(run: RunConfig, corpus: Corpus, checkpoint: Checkpoint | None) -> dict[str, Tensor] | None:
    """The weights to start a run from, after checking that they belong to this model and tokenizer; the data of a resumed one."""
    if checkpoint is not None:
        if checkpoint.state["data"] != corpus.fingerprint:
            raise UserError(
                f"the data are not those of {checkpoint.path} (fingerprint {checkpoint.state['data'][:12]}, now "
                f"{corpus.fingerprint[:12]}); bring them back, or start a new run with init_from={checkpoint.path}"
            )
        return None  # the saver brings back weights and optimizer state, whoever wrote them
    if not run.init_from:
        return None
    source = read_checkpoint(Path(run.init_from))
    if source.state["tokenizer"] != corpus.tokenizer.identity:
        raise UserError(
            f"init_from={run.init_from} was trained with the tokenizer {source.state['tokenizer']}, this run has "
            f"{corpus.tokenizer.identity}; set tokenizer.path={run.init_from} or choose its tokenizer"
        )
    weights = source.model_tensors()
    with torch.device("meta"):
        expected = GPT(run.model, run.attention, corpus.tokenizer.n_vocab, corpus.tokenizer.end_of_text).state_dict()
    if {name: tensor.shape for name, tensor in weights.items()} != {
        name: tensor.shape for name, tensor in expected.items()
    }:
        raise UserError(
            f"init_from={run.init_from} holds a {source.state['config']['model']['name']}, whose shapes are not those of "
            f"model={run.model.name}; choose model={source.state['config']['model']['name']}"
        )
    return weights


def restore(checkpoint: Checkpoint, saver: Saver, scale: LossScale) -> Progress:
    state = checkpoint.state
    saver.restore(checkpoint)
    scale.load_state(state["loss_scale"])
    torch.set_rng_state(torch.tensor(state["torch_random"], dtype=torch.uint8))
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


# --------------------------------------------------------------------------------------------------- the run folder


def new_run_folder(run: RunConfig) -> Path:
    name = run.name or f"{run.model.name}-{run.data.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(run.runs_dir) / name
    begun_without_checkpoint = run.resume == "auto" and not checkpoints_of(folder)  # killed before its first save
    if (folder / "config.yaml").exists() and not begun_without_checkpoint:
        raise UserError(f"name={name}: {folder} exists; go on with it by resume=auto, or choose another name")
    return folder


@contextlib.contextmanager
def run_folder_held(folder: Path, checkpoint: Checkpoint | None, console: Console) -> Iterator[None]:
    """The folder, made where it is not there, is this process's alone; what a crash left half-written is gone."""
    with contextlib.ExitStack() as held:
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive_lock(folder / ".lock"))
        except Locked as holder:
            raise UserError(
                f"{folder} is in use by another process ({holder}); wait for it, or choose another name=…"
            ) from None
        except OSError as error:
            raise UserError(
                f"runs_dir: {folder} cannot be written ({error.strerror}); set runs_dir=… to a folder that can"
            ) from None
        for unfinished in (folder, folder / "checkpoints"):
            remove_unfinished(unfinished)
        for path in set_aside_after(folder, checkpoint.step) if checkpoint else []:
            console.say(f"set aside, because the run goes back behind it: {path}")
        yield


def write_config(folder: Path, run: RunConfig) -> None:
    """The resolved configuration, from which the run can be started again."""
    import yaml

    with storing(folder / "config.yaml"):
        replace_text(
            folder / "config.yaml", yaml.safe_dump(plain_text(to_plain(run)), sort_keys=False, allow_unicode=True)
        )


def plain_text(value: Any) -> Any:
    """Strings as plain `str`, all the way down: what YAML and JSON writers know."""
    if isinstance(value, dict):
        return {str(key): plain_text(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain_text(entry) for entry in value]
    return str(value) if isinstance(value, str) else value


def open_loggers(
    run: RunConfig, folder: Path, checkpoint: Checkpoint | None, console: Console, derived: dict[str, Any]
) -> tuple[list[Logger], str | None]:
    """The run folder first, then the console, then wandb; with wandb's run id, kept in checkpoints for a resume."""
    run_folder = RunFolder(folder)
    run_folder.cut_after(checkpoint.step if checkpoint else -1)
    loggers: list[Logger] = [run_folder, console]
    mode, line = choose_wandb_mode(run.logger.wandb)
    console.say(line)
    run_id = checkpoint.state.get("wandb_id") if checkpoint else None
    if mode != "disabled":
        known = plain_text(to_plain(run)) | derived | {"platform": platform.platform(), "torch": torch.__version__}
        wandb = Wandb(run.logger, mode, Path(run.runs_dir), folder.name, run.model.name, run_id, known)
        loggers.append(wandb)
        run_id = wandb.run_id
    return loggers, run_id


def drawer(run: RunConfig, corpus: Corpus, observe: Observe | None) -> Callable[[GPT], str] | None:
    """What draws the attention of train.lens_prompt, or else of the first held-out tokens."""
    prompt, tokenizer = run.train.lens_prompt, corpus.tokenizer
    if prompt is None:
        held_out = corpus.sources[0].val[: min(LENS_TOKENS, run.model.sequence_length - 1)]
        prompt = tokenizer.decode([token for token in held_out.tolist() if token != tokenizer.end_of_text])
    if observe is None or not prompt:
        return None
    return lambda model: observe(model, tokenizer, prompt)


def sampler(run: RunConfig, corpus: Corpus) -> WriteSamples:
    """What writes samples during training: the generation engine on the model as it is."""

    def write(model: GPT, seed: int, count: int) -> list[dict[str, str]]:
        prompt, sampling = str(run.data.sample_prompt), Sampling(temperature=SAMPLE_TEMPERATURE)
        request = Request(run.train.sample_tokens, num_samples=count, seed=seed, sampling=sampling)
        return [{"prompt": prompt, "text": text} for text in Engine(model, corpus.tokenizer).write(prompt, request)]

    return write
