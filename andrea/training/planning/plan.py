"""The plan of a run: a configuration made once for its text and this machine, with a reason for each choice.

AUTO is the one table of the keys that are chosen here if they are `auto`. A new run takes its rows in turn. Checkpoints hold the
chosen values, and the list of the keys that were left `auto`; a resumed run chooses such a key again if one that it depends on
has changed.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from andrea.attention import Case, choose, make_compatibility, packed_documents
from andrea.attention.implementations.fastest import measure
from andrea.config import RunConfig, UserError, as_typed
from andrea.model.gpt import make_mask, make_modifiers
from andrea.model.lora import ALPHA
from andrea.model.size import count_parameters, count_trained
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import (
    WEIGHT_DTYPE,
    Choice,
    choose_precision,
    choose_threads,
    determinism_restored,
    set_determinism,
    unused_gpu,
)
from andrea.text.corpus import Corpus
from andrea.training.evaluation import measures_every_step
from andrea.training.planning import length, memory
from andrea.training.planning.memory import Machine, Placement
from andrea.training.records.console import format_memory

BEGAN = "chosen when the run began"  # by an earlier process of the run
LENGTH = ("train.steps", "train.flops", "train.tokens_per_parameter")
INTERVALS = ("train.eval_every", "train.save_every")


@dataclass(frozen=True)
class Situation:
    """What a choice depends on besides the configuration. choices: those of the rows above, by key."""

    machine: Machine
    corpus: Corpus
    choices: dict[str, Choice] = field(default_factory=dict)

    @property
    def n_vocab(self) -> int:
        return self.corpus.tokenizer.n_vocab

    @property
    def placement(self) -> Placement:
        precision, is_sharded = self.choices["precision"].value, self.choices["sharing"].value == "fsdp"
        return Placement(self.machine.device, precision, self.machine.ranks.size, is_sharded)


@dataclass(frozen=True)
class Auto:
    """How a key that may be `auto` gets its value.

    choose: from the configuration, with the rows above chosen. depends_on: keys; if one of them changes, a resumed run chooses
    again. is_checked: `choose` also gets a configured value, which may be impossible here, and returns it with its reason.
    """

    choose: Callable[[RunConfig, Situation], Choice]
    depends_on: tuple[str, ...] = ()
    is_checked: bool = False


def reads_often(config: RunConfig, here: Situation) -> bool:
    return length.epochs_of(config.steps, config, here.corpus) > length.MOST_EPOCHS


def micro_batch(config: RunConfig, here: Situation) -> Choice:
    """Sequences in one pass of a rank: the configured number or, for `auto`, the most that the memory plan allows.

    Raises UserError for `auto` on a CPU where not even one sequence fits: Linux would kill the run without a word.
    """
    most, configured = here.machine.ranks.local_rows(config.sequences_per_step)[2], config.train.micro_batch
    if configured == "auto":
        free = here.machine.free_bytes
        configured = memory.micro_batches_that_fit(config, here.n_vocab, here.placement, memory.USABLE_SHARE * free)[0]
        needed = memory.memory_of(config, here.n_vocab, configured, here.placement).total
        if here.machine.device.type == "cpu" and needed > free:
            raise UserError(
                f"model={config.model.name} needs {format_memory(needed)} with one sequence in a pass, and a process may have "
                f"{format_memory(free)} here; choose a smaller model or model.sequence_length, free memory, or try it all the "
                f"same with train.micro_batch=1"
            )
    return Choice(min(configured, most))


def interval(config: RunConfig, here: Situation) -> Choice:
    is_planned_now = "train.steps" in here.choices and length.is_small(config, here.corpus)
    return Choice(part_of(config.steps, length.EVALUATIONS if is_planned_now else length.QUARTERS))


def part_of(n_step: int, evaluations: int) -> int:
    """The steps between two of so many evaluations."""
    return max(1, -(-n_step // evaluations))


# The keys that may be `auto`, in the order of their choice. A run's sharing is no key: `parallel.kind` stays as it was typed.
AUTO = {
    # Before train.steps: RunConfig.max_minutes asks whether that is still `auto`.
    "train.max_minutes": Auto(lambda config, here: Choice(config.max_minutes), LENGTH),
    "train.steps": Auto(lambda config, here: Choice(length.steps_for_text(config, here.corpus)), LENGTH[1:]),
    # The next four are chosen once, when the run begins.
    "model.bigram_rows": Auto(
        lambda config, here: Choice(None if reads_often(config, here) else config.model.n_bigram_row)
    ),
    "optimizer.muon_rows": Auto(
        lambda config, here: Choice("none" if reads_often(config, here) else config.optimizer.rows)
    ),
    "optimizer.weight_decay": Auto(lambda config, here: Choice(length.weight_decay_for_text(config, here.corpus))),
    "tokenizer.vocab_size": Auto(lambda config, here: Choice(here.n_vocab)),
    "threads": Auto(lambda config, here: Choice(choose_threads(config.threads)), ("device",), is_checked=True),
    "precision": Auto(
        lambda config, here: choose_precision(config.precision, here.machine.device), ("device",), is_checked=True
    ),
    "compile": Auto(
        lambda config, here: choose_compile(
            config.compile, here.machine.device, memory.flops_of_run(config, here.n_vocab)
        ),
        (*LENGTH, "device"),
        is_checked=True,
    ),
    "deterministic": Auto(lambda config, here: Choice(here.machine.device.type == "cpu"), ("device",)),
    "sharing": Auto(lambda config, here: memory.choose_sharing(config, here.machine, here.n_vocab), is_checked=True),
    "train.micro_batch": Auto(micro_batch, ("device", "precision", "train.activation_checkpointing"), is_checked=True),
    **dict.fromkeys(INTERVALS, Auto(interval, LENGTH)),
    "attention.implementation": Auto(
        lambda config, here: choose_attention(config, here.machine.device), ("device", "precision"), is_checked=True
    ),
}


@dataclass(frozen=True)
class Plan:
    """The run as it is planned before anything is built. Two choices need the built model: the micro-batch and `compile`.

    config: with a value for each key of AUTO. left_auto: the keys that the user has left `auto`, also if an earlier process
    of the run has chosen their values. is_micro_batch_chosen: whether this process has chosen it. groups: the choice of each
    group, {"model": "andrea-nano", …}. sharing: none, ddp or fsdp. is_for_text: whether the length was chosen for a small text.
    is_judged_on_a_part: whether the best evaluation is chosen on the first half of the held-out text, and judged on the rest.
    most_steps: of a run with train.max_minutes. expected_epochs: of the length that the program itself chooses; 0 if the user
    gave one. lines: choices and reasons, for the terminal.
    """

    config: RunConfig
    left_auto: list[str]
    is_micro_batch_chosen: bool
    groups: dict[str, str]
    sharing: str
    is_for_text: bool
    is_judged_on_a_part: bool
    most_steps: int
    expected_epochs: float
    lines: list[str]

    def of_length(self, n_step: int, evaluations: int | None = None) -> RunConfig:
        """The configuration with another length. Intervals that were left `auto` are chosen for it.

        evaluations: of a run with train.max_minutes. Without it, a run that is planned for a small text keeps its intervals.
        """
        if n_step == self.config.steps:
            return self.config
        is_kept = self.is_for_text and evaluations is None
        every = {} if is_kept else {
            key.partition(".")[2]: part_of(n_step, evaluations or length.QUARTERS) for key in INTERVALS if key in self.left_auto
        }  # fmt: skip
        return dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, steps=n_step, **every))


def make_plan(
    asked: RunConfig,
    left_auto: Collection[str],
    groups: dict[str, str],
    planned_steps: int | None,
    machine: Machine,
    corpus: Corpus,
) -> Plan:
    """Choose a value for each key of AUTO that is `auto`, on rank 0 for all ranks.

    planned_steps: the length of a resumed run, as planned now. Raises UserError for settings that cannot work here.
    """
    here = Situation(machine, corpus)
    config = with_choices(asked, left_auto, here)
    train = dataclasses.replace(config.train, steps=config.steps, tokens_per_step=config.tokens_per_step)
    config = dataclasses.replace(config, train=train)
    given = config.train.flops is not None or config.train.tokens_per_parameter is not None
    is_length_auto = "train.steps" in left_auto and not given
    is_for_text = is_length_auto and length.is_small(config, corpus)
    is_time_set = "train.max_minutes" not in left_auto  # else the run gets no longer than the model's recipe
    return Plan(
        config,
        list(left_auto),
        asked.train.micro_batch == "auto",
        groups,
        here.choices["sharing"].value,
        is_for_text,
        is_for_text and length.is_judged_on_a_part(config, corpus),
        length.most_steps_for_text(config, corpus) if is_length_auto and is_time_set else config.steps,
        length.epochs_of(length.steps_for_text(config, corpus), config, corpus) if is_length_auto else 0.0,
        lines_of(asked, config, here, planned_steps or config.steps, planned_steps is not None),
    )


def with_choices(
    config: RunConfig, left_auto: Collection[str], here: Situation, keys: Iterable[str] = AUTO
) -> RunConfig:
    """The configuration with a value for each of `keys` that is `auto`; here.choices gets the choices."""
    for key in keys:
        row, configured = AUTO[key], "" if key == "sharing" else attrgetter(key)(config)
        if configured != "auto" and not row.is_checked:
            continue
        choice = row.choose(config, here)
        if key in left_auto and configured != "auto":
            choice = Choice(choice.value, BEGAN)
        here.choices[key] = choice
        if key != "sharing":
            config = with_value(config, key, choice.value)
    return config


def with_value(config: Any, key: str, value: Any) -> Any:
    """The dataclass with another value for a dotted key."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})


def lines_of(asked: RunConfig, config: RunConfig, here: Situation, n_step: int, is_resumed: bool) -> list[str]:
    """What the terminal shows of the plan. asked: the configuration with `auto` still in it."""
    ranks, choices = here.machine.ranks, here.choices
    parameters, device = count_parameters(config.model, config.attention, here.n_vocab), here.machine.device
    shown = f"{device}, {config.threads} threads" if device.type == "cpu" else str(device)
    if device.type == "cuda":
        shown = f"{device} ({torch.cuda.get_device_name(device)})"
    n_token = sum(len(source.train) for source in here.corpus.sources)
    lines = [
        f"model: {config.model.name}, {parameters.total:,} parameters · tokenizer {here.corpus.tokenizer.identity} · "
        f"{n_token:,} training tokens",
        f"{n_step} steps of {config.tokens_per_step:,} tokens, {length.epochs_of(n_step, config, here.corpus):.2f} epochs · "
        f"micro-batch: {config.train.micro_batch} of {config.sequences_per_step} sequences"
        + (f" on each of {ranks.size} ranks" if ranks.size > 1 else ""),
        f"device: {shown} · {config.precision} ({choices['precision'].why})",
        *(unused_gpu() if asked.device == "auto" else []),
        *length.small_text_lines(asked, config, here.corpus),
    ]
    if rank := config.model.lora_rank:
        n_trained = count_trained(config.model, config.attention, here.n_vocab)
        lines.append(
            f"LoRA: {n_trained:,} of {parameters.total:,} parameters are trained, factors of rank {rank} times {ALPHA / rank:g}, "
            f"by AdamW at optimizer.learning_rate={config.optimizer.learning_rate:g}; the others are frozen"
        )
    if ranks.started_by_torchrun:
        lines.append(f"parallel: {choices['sharing'].value} over {ranks.size} ranks ({choices['sharing'].why})")
    intervals = [f"{key}={choices[key].value}" for key in INTERVALS if key in choices]
    if is_resumed and intervals:
        lines.append(f"recomputed for {config.steps} steps, because they are set to auto: {', '.join(intervals)}")
    attention = choices["attention.implementation"]
    lines.append(f"attention: {f'{attention.value} ({BEGAN})' if attention.why == BEGAN else attention.why}")
    is_deterministic = " · deterministic" if config.deterministic else ""
    lines.append(f"torch.compile: {config.compile} ({choices['compile'].why}){is_deterministic}")
    return lines


# ------------------------------------------------------------------------------------- a resumed run


def keys_left_auto(
    settings: dict[str, Any], remembered: Collection[str] = (), typed: Collection[str] = ()
) -> list[str]:
    """The keys of `settings` (dotted) that are `auto`, and the remembered keys that nobody has typed since."""
    return sorted({key for key, value in settings.items() if value == "auto"} | set(remembered) - set(typed))


def choose_again(
    after: dict[str, Any], changed: Collection[str], left_auto: Collection[str], typed: Collection[str]
) -> dict[str, Any]:
    """The settings of `after` (dotted) that become `auto` or null, because keys that they depend on have changed.

    changed: the keys that differ from the saved ones. typed: the keys whose value was typed. Raises UserError for two lengths.
    """
    again: dict[str, Any] = {}
    lengths = [key for key in LENGTH if key in typed and after[key] not in (None, "auto")]
    if any(key in changed for key in lengths):  # two of them would contradict each other
        if len(lengths) > 1:
            both = " and ".join(f"{key}={as_typed(after[key])}" for key in lengths)
            raise UserError(f"{both} both set the length of training; leave one out")
        others = {"train.steps": "auto", "train.flops": None, "train.tokens_per_parameter": None}
        again |= {key: value for key, value in others.items() if key not in typed and after.get(key) != value}
    for key, row in AUTO.items():
        is_chosen = key in left_auto and key not in typed and after.get(key) != "auto"
        if is_chosen and any(cause in changed or cause in again for cause in row.depends_on):
            again[key] = "auto"
    return again


# ------------------------------------------------------------------------------------- attention


def choose_attention(config: RunConfig, device: torch.device) -> Choice:
    """The implementation for training, which serves all windows; on a GPU, `auto` is the fastest in a measurement made now."""
    model, dtype, n_token = config.model, WEIGHT_DTYPE[config.precision], config.model.sequence_length
    layers_of_window = Counter(map(config.attention.window_of, range(model.n_layer)))
    masks = {window: make_mask(window) for window in layers_of_window}
    if not config.attention.across_documents:  # four documents, as an example
        packing = packed_documents(torch.arange(n_token, device=device)[None, None] * 4 // n_token)
        masks = {window: mask & packing for window, mask in masks.items()}
    compatibility = make_compatibility(config.attention.compatibility, model.n_head, model.head_width, model.n_kv_head)
    shapes = [(1, n_head, n_token, model.head_width) for n_head in (model.n_head, model.n_key_head)]
    query, key = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    asked, measured = config.attention.implementation, measures_every_step(config.attention)
    try:
        compiled = config.compile != "off"
        sink = torch.empty(model.n_head, device=device, requires_grad=True) if config.attention.sink else None
        how = {"modifiers": make_modifiers(model, config.attention), "sink": sink}
        cases = {
            window: Case(query, key, key, compatibility, mask, statistics=measured, compiled=compiled, **how)
            for window, mask in masks.items()
        }
        chosen = [choose(asked, case) for case in cases.values()]
    except ValueError as error:
        raise UserError(f"attention.{error}; choose another, or attention.implementation=auto") from None
    reasons = "; ".join(dict.fromkeys(f"{name} ({why})" for name, why in chosen))
    if asked != "auto" or device.type != "cuda" or measured or not compatibility.lowers:
        return Choice(asked, reasons)
    with determinism_restored():
        set_determinism(config.deterministic is True)  # what torch then refuses is left out
        measured_times = [measure(case, config.train.micro_batch, compiled) for case in cases.values()]
    served = [name for name in measured_times[0] if all(name in times for times in measured_times)]
    if not served:
        return Choice(asked, reasons)
    of_windows = list(zip(layers_of_window.values(), measured_times, strict=True))
    mean_ms = {name: sum(n * times[name] for n, times in of_windows) / model.n_layer for name in served}  # of a layer
    fastest, *_ = by_time = sorted(served, key=lambda name: mean_ms[name])
    shown = ", ".join(f"{name} {mean_ms[name]:.2f} ms" for name in by_time)
    return Choice(fastest, f"{fastest} (fastest here, forward and backward: {shown})")
