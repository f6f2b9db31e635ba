"""The output of `dry_run=true`: a run's parameters, FLOPs, memory by part and time, before it starts or is resumed."""

import dataclasses
import itertools
import time

import torch

from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig
from andrea.model import GPT, initialise
from andrea.model.size import count_parameters, flops_per_token
from andrea.model.transfer import Transfer
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import choose_device, choose_precision, choose_threads
from andrea.text.loader import Loader
from andrea.training.expected.curves import ExpectedCurves
from andrea.training.optimizer import LossScale, Optimizer
from andrea.training.parallel.ranks import Parallel, Ranks
from andrea.training.planning import memory
from andrea.training.planning.length import planned_vocabulary
from andrea.training.planning.memory import Memory, Placement
from andrea.training.records import Progress
from andrea.training.records.console import Console, format_duration, format_memory
from andrea.training.start import make_loss, micro_batch_loss
from andrea.training.step import Batch, TrainingStep

TRIAL_STEPS, TRIAL_SECONDS = 3, 4.0  # no step is begun after so many seconds
MOST_TRIAL_FLOPS = {"cpu": 1e12, "gpu": 1e14}  # of a micro-batch: some seconds
CARDS = ((1, 24), (1, 80), (8, 80))  # that the memory is planned for: their number, and GB of each


def describe(config: RunConfig, checkpoint: Checkpoint | None = None, progress: Progress | None = None) -> str:
    """The plan as lines of text. Raises UserError for settings that cannot work on this machine.

    checkpoint, progress: of a run that would be resumed. The lines then show what remains of it.
    """
    n_vocab = checkpoint.tokenizer().n_vocab if checkpoint else planned_vocabulary(config)
    device = choose_device(config.device)
    precision = choose_precision(config.precision, device)
    placement, free = Placement(device, precision.value), memory.free_bytes(device)
    micro_batch = config.train.micro_batch
    if micro_batch == "auto":
        micro_batch = memory.micro_batches_that_fit(config, n_vocab, placement, memory.USABLE_SHARE * free)[0]
    micro_batch = min(micro_batch, config.sequences_per_step)  # as `plan.micro_batch` makes it
    needed = memory.memory_of(config, n_vocab, micro_batch, placement)
    per_token = flops_per_token(config.model, config.attention, n_vocab)
    parameters = count_parameters(config.model, config.attention, n_vocab)
    tied = " (tied to the embedding)" if config.model.tied_head else ""
    remaining = max(0, progress.planned_steps - progress.step) if progress else config.steps
    tokens = remaining * config.tokens_per_step
    whole, follows = (progress.planned_steps, progress.follows_recipe) if progress else (config.steps, True)
    expected = ExpectedCurves.of(config).words_at_end(whole, config.model.name) if follows else ""
    rows = [
        ("model", f"{config.model.name}, {n_vocab:,} tokens in the vocabulary, T = {config.model.sequence_length}"),
        ("parameters", f"{parameters.total:,}"),
        *((f"  {part}", f"{n:,}{tied * (part == 'head')}") for part, n in vars(parameters).items()),
        ("FLOPs per token", f"{per_token:,} (forward and backward)"),
        *window_rows(config),
        (
            "memory",
            f"{format_memory(needed.total)} at the peak, micro-batch: {micro_batch} of {config.sequences_per_step} sequences",
        ),
        *((f"  {part}", format_memory(n_byte)) for part, n_byte in bytes_of_parts(needed).items()),
        ("free memory", f"{format_memory(free)} on {device}, {precision.value} ({precision.why})"),
        *((f"on {n} GPU{'s' * (n > 1)} of {size} GB", on_cards(config, n_vocab, n, size)) for n, size in CARDS),
        ("tokens per step", f"{config.tokens_per_step:,}"),
        ("micro-batch", f"{micro_batch} sequences"),
        *length_rows(config, per_token, progress),
        ("expected time", expected_time(config, n_vocab, device, precision.value, tokens)),
        *([("expected", expected)] if expected else []),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}} {value}" for name, value in rows)


def other_lengths(config: RunConfig) -> str:
    """Words on the other lengths that the run may get once the text and the pace are known; empty if there are none."""
    by_text = ", or fewer if the text is small" if config.train.steps == "auto" else ""
    if config.max_minutes is None:
        return by_text
    if by_text and config.train.max_minutes != "auto":
        return f", or as many as fit into train.max_minutes={config.max_minutes:g}; fewer if the text is small"
    return f", or fewer to fit into train.max_minutes={config.max_minutes:g}"


def window_rows(config: RunConfig) -> list[tuple[str, str]]:
    """The keys that a query sees in each layer; no row without a window."""
    windows = [config.attention.window_of(layer) for layer in range(config.model.n_layer)]
    if not any(windows):
        return []
    runs = [(window, len(list(layers))) for window, layers in itertools.groupby(windows)]
    shown = [f"{'all' if window is None else f'{window:,}'} in {n} layer{'s' * (n > 1)}" for window, n in runs]
    return [("keys that a query sees", f"at most {', then '.join(shown)}")]


def length_rows(config: RunConfig, flops_per_token: int, progress: Progress | None) -> list[tuple[str, str]]:
    """Steps, tokens and FLOPs of a new run, or those that remain of a run with `progress`."""
    steps, of_steps, of_tokens, of_flops = config.steps, other_lengths(config), "", ""
    if progress is not None:
        whole, steps = progress.planned_steps, max(0, progress.planned_steps - progress.step)
        of_steps = f" remain of {whole:,}"
        of_tokens = f" remain of {whole * config.tokens_per_step:,}"
        of_flops = f" remain of {whole * config.tokens_per_step * flops_per_token:.3g}"
    tokens = steps * config.tokens_per_step
    return [
        ("steps", f"{steps:,}{of_steps}"),
        ("tokens", f"{tokens:,}{of_tokens}"),
        ("FLOPs", f"{tokens * flops_per_token:.3g}{of_flops}"),
    ]


def expected_time(config: RunConfig, n_vocab: int, device: torch.device, precision: str, tokens: int) -> str:
    """The time of training on `tokens` tokens at the speed of steps that are made now, unless these take long."""
    if config.train.teachers or config.objective.kind != "next_token" or Ranks().started_by_torchrun:
        return "not measured with teachers, several ranks, or an objective other than next_token"
    seconds = trial_step_seconds(config, n_vocab, device, precision)
    if seconds is None:
        return f"not measured: one sequence is more than a trial on {device.type} may compute"
    is_compiled = choose_compile(config.compile, device, memory.flops_of_run(config, n_vocab)).value != "off"
    compiled = " without torch.compile, which makes them faster" if is_compiled else ""
    return (
        f"about {format_duration(tokens / config.tokens_per_step * seconds)} at {config.tokens_per_step / seconds:,.0f} "
        f"tokens/s, an estimate from steps made now{compiled}; evaluations and samples come on top"
    )


def trial_step_seconds(config: RunConfig, n_vocab: int, device: torch.device, precision: str) -> float | None:
    """The time of a step, from real ones on random tokens; None if one sequence takes more than MOST_TRIAL_FLOPS."""
    length = config.model.sequence_length
    most = MOST_TRIAL_FLOPS["cpu" if device.type == "cpu" else "gpu"] // (
        length * flops_per_token(config.model, config.attention, n_vocab)
    )
    fitting = memory.micro_batches_that_fit(
        config, n_vocab, Placement(device, precision), memory.USABLE_SHARE * memory.free_bytes(device)
    )
    micro_batch = next((n for n in fitting if n <= most), None)
    if micro_batch is None:
        return None
    choose_threads(config.threads)
    train = dataclasses.replace(config.train, micro_batch=micro_batch)
    config = dataclasses.replace(config, precision=precision, compile="off", train=train)
    model, console = GPT(config.model, config.attention, n_vocab, n_vocab - 1), Console(TRIAL_STEPS, quiet=True)
    initialise(model, torch.Generator(), Transfer.of(config.model, config.optimizer))
    parallel, micro_loss = Parallel(model.to(device)), micro_batch_loss(model, config, device)
    loss, config = make_loss(parallel, micro_loss, config, device, console, may_run_uncompiled=False)
    optimizer = Optimizer(parallel, config.optimizer, bf16=config.precision == "bf16")
    scale, no_text = LossScale(device, active=config.precision == "fp16"), Loader([], length, seed=0)
    step = TrainingStep(config, parallel, loss, optimizer, scale, no_text, device, console)

    def seconds(n_pass: int) -> float:
        tokens = torch.randint(n_vocab, (n_pass * micro_batch, length))
        batch = Batch(tokens, tokens, tokens.numel(), torch.zeros(len(tokens), dtype=torch.int64), len(tokens))
        times: list[float] = []
        while len(times) < TRIAL_STEPS and sum(times) < TRIAL_SECONDS:
            clock = time.perf_counter()
            float(step.run(batch, 1.0, stop_flags=list, measure_size=False).loss)  # waits for the device
            times.append(time.perf_counter() - clock)
        return min(times)

    n_pass, of_one = config.sequences_per_step // micro_batch, seconds(1)
    return of_one if n_pass == 1 else of_one + (n_pass - 1) * max(0.0, seconds(2) - of_one)


def on_cards(config: RunConfig, n_vocab: int, ranks: int, gigabytes: int) -> str:
    """The layout of the run on `ranks` GPUs of 24 or 80 GB: sharing, micro-batch, and memory per GPU by part."""
    precision, free = "bf16" if config.precision == "auto" else config.precision, memory.FREE_ON_CARD[gigabytes]
    sharing = memory.sharing_that_fits(config, n_vocab, Placement(memory.CARD, precision, ranks), free)
    placement = Placement(memory.CARD, precision, ranks, sharing.value == "fsdp" and ranks > 1)
    micro_batch = memory.micro_batches_that_fit(config, n_vocab, placement, memory.USABLE_SHARE * free)[0]
    needed = memory.memory_of(config, n_vocab, micro_batch, placement)
    if needed.total > memory.USABLE_SHARE * free:
        return f"does not fit: {sharing.why}; train.activation_checkpointing=true needs less memory"
    parts = " · ".join(f"{part} {format_memory(n_byte)}" for part, n_byte in bytes_of_parts(needed).items())
    how = f"{sharing.value}, " if ranks > 1 else ""
    return f"{how}{precision}, micro-batch: {micro_batch} sequences, {format_memory(needed.total)} per GPU ({parts})"


def bytes_of_parts(needed: Memory) -> dict[str, int]:
    """Bytes of each part that is not empty. Their sum is above the peak: not all are in memory at the same time."""
    parts = dataclasses.asdict(needed)
    return {name.replace("_", " "): n_byte for name, n_byte in parts.items() if n_byte}
