"""From a configuration to a run: settle what was left `auto`, prepare the data, build everything, train."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.attention import HeadStatistics, choose, make_compatibility, packed_documents
from andrea.attention.fastest import measure
from andrea.checkpoint import Checkpoint, checkpoints_of, read_checkpoint, remove_unfinished, replace_text
from andrea.config import Text, TrainingRun, UserError, to_plain
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT, initialise, make_mask
from andrea.model.size import count_parameters, flops_per_token
from andrea.model.transfer import Transfer
from andrea.text.loader import Loader
from andrea.text.prepare import Corpus, prepare
from andrea.text.tokenizer import Tokenizer
from andrea.training import plan
from andrea.training.console import Console
from andrea.training.device import (
    Choice,
    autocast,
    choose_compile,
    choose_device,
    choose_precision,
    choose_threads,
    peak_flops,
    weight_dtype,
)
from andrea.training.health import Data, Health
from andrea.training.loggers import Logger, RunFolder, Wandb, choose_wandb_mode
from andrea.training.loss import IGNORED, loss_sum
from andrea.training.optimizer import Optimizer
from andrea.training.resume import run_folder_of
from andrea.training.scaler import LossScale
from andrea.training.text_health import ReferenceText
from andrea.training.trainer import Progress, Trainer

SAMPLE_TEMPERATURE = 0.8  # of the samples written during training
LENS_TOKENS = 40  # of held-out text, drawn at each evaluation where no prompt is given
WriteSamples = Callable[[GPT, int, int], list[dict[str, str]]]
Observe = Callable[[GPT, Tokenizer, str], str]  # model, tokenizer, prompt -> HTML


def start(run: TrainingRun, checkpoint: Checkpoint | None, observe: Observe | None = None) -> int:
    """Train `run`, from `checkpoint` where one is given; returns the process's exit code. Raises UserError.

    observe: draws the page of a fixed prompt at each evaluation; what rooms above this one show, the script hands over.
    """
    console = Console(run.steps)
    device = choose_device(run.device)
    folder = run_folder_of(checkpoint) if checkpoint else new_run_folder(run)
    may_do_without_compile = run.compile == "auto"
    corpus = prepare(run.data, run.tokenizer, Path(run.data_dir), console.say)
    weights = read_weights(run, corpus, checkpoint)
    run = settle(dataclasses.replace(run, name=Text(folder.name)), device, corpus, console)
    folder_created(folder, "runs_dir")
    remove_unfinished(folder / "checkpoints")
    console.say(f"run: {folder.resolve()}")

    torch.manual_seed(run.seed)
    model = GPT(run.model, run.attention, corpus.tokenizer.n_vocab, corpus.tokenizer.end_of_text)
    if weights is None:
        initialise(model, torch.Generator().manual_seed(run.seed), Transfer.of(run.model, run.optimizer))
    else:
        model.load_state_dict(weights)
    model.to(device)
    optimizer = Optimizer(model, run.optimizer, bf16=run.precision == "bf16")
    scale = LossScale(device, active=run.precision == "fp16")
    progress = restore(checkpoint, optimizer, scale) if checkpoint else Progress()

    loss, run = make_loss_sum(model, run, device, console, may_do_without_compile)
    write_config(folder, run)
    per_token = flops_per_token(run.model, run.attention, corpus.tokenizer.n_vocab)
    derived = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": per_token,
        "tokens_per_step": run.tokens_per_step,
        "tokenizer_identity": corpus.tokenizer.identity,
        "data_fingerprint": corpus.fingerprint,
    }
    loggers, run_id = open_loggers(run, folder, checkpoint, console, derived)
    facts = {"config": to_plain(run), "data": corpus.fingerprint, "wandb_id": run_id}

    health = make_health(run, corpus, checkpoint)
    trainer = Trainer(
        run=run, folder=folder, corpus=corpus, model=model, loss_sum=loss, optimizer=optimizer, scale=scale, device=device,
        precision=run.precision, micro_batch=run.train.micro_batch, flops_per_token=per_token, peak_flops=peak_flops(device),
        progress=progress, loggers=loggers, console=console, write_samples=sampler(run, corpus), health=health,
        draw=drawer(run, corpus, observe), facts=facts,
    )  # fmt: skip
    code = 1
    try:
        code = trainer.train()
    finally:
        for logger in loggers:
            logger.finish(code)
    return code


# ------------------------------------------------------------------------------------------- what was left to us


def settle(run: TrainingRun, device: torch.device, corpus: Corpus, console: Console) -> TrainingRun:
    """Replace every `auto` by what it means here, say what and why, and make torch work that way."""
    threads = choose_threads(run.threads)
    precision = choose_precision(run.precision, device)
    per_token = flops_per_token(run.model, run.attention, corpus.tokenizer.n_vocab)
    compile_ = choose_compile(run.compile, device, run.steps * run.tokens_per_step * per_token)
    deterministic = device.type == "cpu" if run.deterministic == "auto" else run.deterministic
    torch.use_deterministic_algorithms(deterministic)
    micro_batch = run.train.micro_batch
    if micro_batch == "auto":
        micro_batch = plan.choose_micro_batch(run, corpus.tokenizer.n_vocab, device, precision.value)
    quarter = max(1, -(-run.steps // 4))
    eval_every = quarter if run.train.eval_every == "auto" else run.train.eval_every
    train = dataclasses.replace(
        run.train,
        steps=run.steps,
        tokens_per_step=run.tokens_per_step,
        micro_batch=min(micro_batch, run.sequences_per_step),
        eval_every=eval_every,
        save_every=quarter if run.train.save_every == "auto" else run.train.save_every,
        attention_every=max(1, run.steps // 20) if run.train.attention_every == "auto" else run.train.attention_every,
        sample_every=eval_every if run.train.sample_every == "auto" else run.train.sample_every,
    )
    run = dataclasses.replace(
        run,
        threads=threads,
        precision=precision.value,
        compile=compile_.value,
        deterministic=deterministic,
        train=train,
    )
    attention = choose_attention(run, device, precision.value, compile_.value, train.micro_batch)
    run = dataclasses.replace(run, attention=dataclasses.replace(run.attention, implementation=attention.value))
    parameters = count_parameters(run.model, run.attention, corpus.tokenizer.n_vocab)
    console.say(
        f"model: {run.model.name}, {parameters.total:,} parameters · tokenizer {corpus.tokenizer.identity} · "
        f"{sum(len(source.train) for source in corpus.sources):,} training tokens"
    )
    console.say(
        f"{run.steps} steps of {run.tokens_per_step:,} tokens, {train.micro_batch} of {run.sequences_per_step} sequences at a time"
    )
    console.say(f"device: {device_words(device, threads)} · {precision.value} ({precision.why})")
    console.say(f"attention: {attention.why}")
    console.say(f"torch.compile: {compile_.value} ({compile_.why})" + (" · deterministic" if deterministic else ""))
    return run


def measures_every_step(run: TrainingRun) -> bool:
    """Our kernel measures the heads in the pass that trains; QK-clip needs their largest logits whatever it costs."""
    return run.attention.implementation == "triton" or run.attention.qk_clip is not None


def choose_attention(run: TrainingRun, device: torch.device, precision: str, compile_: str, micro_batch: int) -> Choice:
    """The implementation training will use: on a card the fastest of those that serve the case, measured now."""
    model, dtype, n_token = run.model, weight_dtype(precision), run.model.sequence_length
    mask = make_mask(run.attention)
    if not run.attention.across_documents:
        mask = mask & packed_documents(torch.arange(n_token, device=device)[None, None] * 4 // n_token)  # say, four
    compatibility = make_compatibility(run.attention.compatibility, model.n_head, model.d_head)
    n_kv_head = model.n_kv_head or model.n_head
    shapes = [(1, n_head, n_token, model.d_head) for n_head in (model.n_head, n_kv_head)]
    query, key = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    asked, measured = run.attention.implementation, measures_every_step(run)
    try:
        name, why = choose(asked, query, key, key, compatibility, mask, measured, compiled=compile_ == "on")
    except ValueError as error:
        raise UserError(f"attention.{error}; choose another, or attention.implementation=auto") from None
    if asked != "auto" or device.type != "cuda" or measured or not compatibility.lowers:
        return Choice(asked, f"{name} ({why})")
    times = measure(micro_batch, model.n_head, n_kv_head, n_token, model.d_head, dtype, device, mask)
    if not times:
        return Choice(asked, f"{name} ({why})")
    fastest = next(iter(times))
    shown = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    return Choice(fastest, f"{fastest} (fastest here, forward and backward: {shown})")


def device_words(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device}, {threads} threads" if device.type == "cpu" else str(device)


def make_loss_sum(
    model: GPT, run: TrainingRun, device: torch.device, console: Console, may_do_without: bool
) -> tuple[Callable[[Tensor, Tensor], tuple[Tensor, HeadStatistics | None]], TrainingRun]:
    """The loss of a micro-batch, with its heads' statistics where every step measures them; compiled when asked, now,
    before the clock starts.

    A machine that cannot compile trains without where compile was left `auto`, and is told so; the choice is the run's.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InductorError

    observing = measures_every_step(run)

    def eager(tokens: Tensor, targets: Tensor) -> tuple[Tensor, HeadStatistics | None]:
        observed: list[HeadStatistics] | None = [] if observing else None
        with autocast(device, run.precision):
            nats = loss_sum(model, tokens, targets, observed)
        counted = (targets != IGNORED).any(1)  # not the rows that fill up the last micro-batch
        return nats, HeadStatistics.of_layers(observed, counted) if observed else None

    if run.compile == "off":
        return eager, run
    compiled = torch.compile(eager, dynamic=False, fullgraph=True)
    console.say("compiling the training step, up to a minute (kept for the next start) …")
    clock = time.perf_counter()
    shape = (run.train.micro_batch, run.model.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    try:
        compiled(tokens, targets)[0].backward()
    except (TorchDynamoException, InductorError, CppCompileError) as error:
        if not may_do_without:
            raise
        console.say(f"torch.compile failed here, training goes on without it: {str(error).strip().splitlines()[0]}")
        return eager, dataclasses.replace(run, compile="off")
    finally:
        model.zero_grad(set_to_none=True)
    console.say(f"compiled in {time.perf_counter() - clock:.0f} s")
    return compiled, run


# ---------------------------------------------------------------------------------------------- what is there already


def read_weights(run: TrainingRun, corpus: Corpus, checkpoint: Checkpoint | None) -> dict[str, Tensor] | None:
    """The weights to start from, after checking that they belong to this model, tokenizer and data."""
    if checkpoint is not None:
        if checkpoint.state["data"] != corpus.fingerprint:
            raise UserError(
                f"the data are not those of {checkpoint.path} (fingerprint {checkpoint.state['data'][:12]}, now "
                f"{corpus.fingerprint[:12]}); bring them back, or start a new run with init_from={checkpoint.path}"
            )
        return checkpoint.model_tensors()
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


def restore(checkpoint: Checkpoint, optimizer: Optimizer, scale: LossScale) -> Progress:
    state = checkpoint.state
    optimizer.load_state_tensors(checkpoint.optimizer_tensors())
    scale.load_state(state["loss_scale"])
    torch.set_rng_state(torch.tensor(state["torch_random"], dtype=torch.uint8))
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


# --------------------------------------------------------------------------------------------------- the run folder


def new_run_folder(run: TrainingRun) -> Path:
    name = run.name or f"{run.model.name}-{run.data.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(run.runs_dir) / name
    begun_without_checkpoint = run.resume == "auto" and not checkpoints_of(folder)  # killed before its first save
    if (folder / "config.yaml").exists() and not begun_without_checkpoint:
        raise UserError(f"name={name}: {folder} exists; go on with it by resume=auto, or choose another name")
    return folder


def folder_created(folder: Path, key: str) -> None:
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{key}: {folder} cannot be written ({error.strerror}); set {key}=… to a folder that can"
        ) from None


def write_config(folder: Path, run: TrainingRun) -> None:
    """The resolved configuration, from which the run can be started again."""
    import yaml

    replace_text(folder / "config.yaml", yaml.safe_dump(plain_text(to_plain(run)), sort_keys=False, allow_unicode=True))


def plain_text(value: Any) -> Any:
    """Strings as plain `str`, all the way down: what YAML and JSON writers know."""
    if isinstance(value, dict):
        return {str(key): plain_text(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain_text(entry) for entry in value]
    return str(value) if isinstance(value, str) else value


def open_loggers(
    run: TrainingRun, folder: Path, checkpoint: Checkpoint | None, console: Console, derived: dict[str, Any]
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


def make_health(run: TrainingRun, corpus: Corpus, checkpoint: Checkpoint | None) -> Health:
    """The judge of the run, who remembers what it had seen before the checkpoint."""
    reference = None
    if run.health.samples and run.train.sample_tokens:
        held_out = [source.val for source in corpus.sources]
        reference = ReferenceText.of(held_out, corpus.tokenizer, run.train.sample_tokens)
    loader = Loader(corpus.sources, run.model.sequence_length, run.seed)
    health = Health(run, corpus.tokenizer.n_vocab, Data.of(corpus, loader), reference)
    if checkpoint is not None and "health" in checkpoint.state:  # older versions wrote none
        health.load_state(checkpoint.state["health"])
    return health


def drawer(run: TrainingRun, corpus: Corpus, observe: Observe | None) -> Callable[[GPT], str] | None:
    """What draws the attention of train.lens_prompt, or else of the first held-out tokens."""
    prompt, tokenizer = run.train.lens_prompt, corpus.tokenizer
    if prompt is None:
        held_out = corpus.sources[0].val[: min(LENS_TOKENS, run.model.sequence_length - 1)]
        prompt = tokenizer.decode([token for token in held_out.tolist() if token != tokenizer.end_of_text])
    if observe is None or not prompt:
        return None
    return lambda model: observe(model, tokenizer, prompt)


def sampler(run: TrainingRun, corpus: Corpus) -> WriteSamples:
    """What writes samples during training: the generation engine on the model as it is."""

    def write(model: GPT, seed: int, count: int) -> list[dict[str, str]]:
        prompt, sampling = str(run.data.sample_prompt), Sampling(temperature=SAMPLE_TEMPERATURE)
        request = Request(run.train.sample_tokens, num_samples=count, seed=seed, sampling=sampling)
        return [{"prompt": prompt, "text": text} for text in Engine(model, corpus.tokenizer).write(prompt, request)]

    return write
