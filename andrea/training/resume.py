"""Runs that begin from a checkpoint: `resume` goes on with its run, `init_from` begins a new run from its weights."""

import dataclasses
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.checkpoint import (
    Checkpoint,
    Damaged,
    checkpoints_of,
    consolidate,
    locate,
    newest_run,
    newest_whole,
    read_checkpoint,
)
from andrea.checkpoint.model import changed_own_parts, check_shapes, configs_of
from andrea.checkpoint.state import check_resumable
from andrea.config import (
    RunConfig,
    UserError,
    as_typed,
    lay_over,
    parse,
    readable_path,
    recipe_fingerprint,
    to_plain,
    with_current_keys,
)
from andrea.config.keys import flatten
from andrea.model.lora import is_factor, train_vocabulary
from andrea.runtime import torchrun
from andrea.runtime.program import typed_words
from andrea.text.chat import ChatTokenizer, for_chat
from andrea.text.corpus import Corpus
from andrea.text.load_tokenizer import configured_tokenizer
from andrea.text.tokenizer import Tokenizer
from andrea.training.optimizer import LossScale, decay_start, may_change, rate_at, relength, saved_shapes
from andrea.training.parallel.saver import Saver
from andrea.training.planning.length import is_open
from andrea.training.planning.plan import AUTO, INTERVALS, choose_again
from andrea.training.records import Progress
from andrea.training.records.run_folder import LOCK, beginning_of, read_lines, run_folder_of

# Keys that a resumed run may not change: with other values it would be a different run. The paths of the text may change,
# because text is recognised by its fingerprint: a run may continue on a machine where the same text has another path.
FIXED = ("model", "attention.compatibility", "attention.score_softcap", "attention.sink", "data.kind", "data.sources",
         "data.include", "data.exclude", "data.field", "tokenizer", "seed", "objective",
         "optimizer.kind", "optimizer.muon_rows", "optimizer.average_half_life", "train.tokens_per_step")  # fmt: skip
NOTICED_JUMP = 0.05  # of the peak learning rate
# Settings of the command, not of the run: never taken from the saved configuration.
OF_THIS_COMMAND = ("resume", "init_from", "dry_run", "name", "runs_dir", "data_dir")
# Settings that depend on the number of ranks: taken from the command line if this number changes.
OF_THE_RANKS = ("threads", "train.micro_batch", "parallel")


def find_resume(config: RunConfig) -> Checkpoint | None:
    """The checkpoint that `resume` names; None for `auto` without one. Raises UserError if the checkpoint does not exist."""
    runs_dir, began = Path(config.runs_dir), torchrun.recorded_run_folder()
    if config.resume != "auto":
        assert config.resume is not None
        found = locate(config.resume, runs_dir, key="resume", newest=True)
        own = newest_whole(began) if began else None  # the run goes on from its own checkpoints, as soon as it has one
        if own is None and not config.name:
            check_newest(found, config)
        return with_found_paths(own or found)
    folder = began or (runs_dir / config.name if config.name else newest_run(runs_dir))
    if folder is None or not os.path.isdir(folder):
        return None
    found = newest_whole(folder)
    if found is None and checkpoints_of(folder):  # a new run would remove checkpoints that may be repairable
        raise UserError(f"resume=auto: every checkpoint of {folder} is damaged; start a new run with another name=…")
    if found is None and (began_from := beginning_of(folder)):  # a new run would begin from random weights
        instead = "in place of resume=auto" if "resume" in began_from else "and without resume"
        raise UserError(
            f"resume=auto: {folder} has no checkpoint yet; type the command that began it again, with "
            f"{typed_words(**began_from)} {instead}"
        )
    return found and with_found_paths(found)


def check_newest(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raises UserError if the run of the checkpoint went further: going on would cut the run's records after this step."""
    run = run_folder_of(checkpoint)
    if run is None or checkpoints_of(run)[-1].name == checkpoint.path.name:
        return
    newest = newest_whole(run, report=lambda line: None)
    if newest is not None and newest.step > checkpoint.step:
        is_usual = run.parent.resolve() == Path(config.runs_dir).resolve()
        itself = typed_words(name=run.name, **({} if is_usual else {"runs_dir": run.parent}))
        raise UserError(
            f"resume={config.resume} is step {checkpoint.step}, but the run went on to step {newest.step}; add name=NEW to "
            f"go on from this step in another run, or add {itself} to take the run itself back to it"
        )


def with_found_paths(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the relative paths that exist where the run was started made absolute, if that was elsewhere."""
    started_in = checkpoint.state.get("working_folder")
    if not isinstance(started_in, str) or started_in == os.getcwd():
        return checkpoint

    def found(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: found(inner, name) for name, inner in value.items()}
        if isinstance(value, list) and key == "teachers":
            return [found(inner, "path") for inner in value]
        is_there = key == "path" and isinstance(value, str) and os.path.exists(os.path.join(started_in, value))
        return os.path.join(started_in, value) if is_there else value

    return dataclasses.replace(checkpoint, state=checkpoint.state | {"config": found(checkpoint.state["config"], "")})


def without_run(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as the start of a new run: run, best result and wandb run are removed from its state."""
    return dataclasses.replace(checkpoint, state=checkpoint.state | {"run": None, "best_bpb": None, "wandb_id": None})


def verified_config(checkpoint: Checkpoint, typed: RunConfig) -> RunConfig:
    """The saved configuration, after the whole checkpoint has been checked against it. Nothing is written.

    typed: the configuration of this command line. It supplies the keys of OF_THIS_COMMAND. Raises Damaged, or UserError if
    the checkpoint has no optimizer state.
    """
    check_resumable(checkpoint.path, checkpoint.state)
    try:
        config = saved_run(checkpoint, typed)
    except UserError as error:
        raise Damaged(
            f"{checkpoint.path} has a configuration that this version of the program cannot read: {error}"
        ) from None
    if checkpoint.state["tokens"] != checkpoint.step * config.tokens_per_step:
        raise Damaged(
            f"{checkpoint.path} is damaged: its state.json has {checkpoint.state['tokens']} tokens after "
            f"{checkpoint.step} steps of {config.tokens_per_step}"
        )
    check_headers(checkpoint, config)
    try:
        torch.Generator().set_state(random_state(checkpoint))
    except RuntimeError:
        raise Damaged(f"{checkpoint.path} is damaged: its state.json has an impossible torch_random") from None
    return config


def check_headers(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raises Damaged if weights or optimizer state do not have the names, shapes and types that `config` gives them."""
    reader = checkpoint.open_tensors()
    shapes = reader.shapes
    weights = {name: shape for name, shape in shapes.items() if "/" not in name}
    model = check_shapes(checkpoint, weights, checkpoint.tokenizer(), config.model, config.attention)
    if config.model.lora_rank and checkpoint.tokenizer().special:
        train_vocabulary(model)
    expected = saved_shapes(dict(model.named_parameters()), config.optimizer)
    for name in sorted(expected.keys() | (shapes.keys() - weights.keys())):
        if expected.get(name) != shapes.get(name):
            raise Damaged(
                f"{checkpoint.path} does not fit its configuration: {name} is {shapes.get(name, 'absent')} in the file, "
                f"{expected.get(name, 'absent')} with optimizer={config.optimizer.kind}"
            )
    for name in shapes:
        if strange := reader.dtypes(name) - {"F32", "F64", "F16", "BF16"}:
            raise Damaged(f"{checkpoint.path} is damaged: {name} has type {min(strange)}, which it cannot have")


def random_state(checkpoint: Checkpoint) -> Tensor:
    return torch.tensor(checkpoint.state["torch_random"], dtype=torch.uint8)


def restore(checkpoint: Checkpoint, saver: Saver, scale: LossScale) -> None:
    """Weights, the optimizer's state, loss scale and random numbers of the checkpoint. The rest of its state is counts."""
    saver.restore(checkpoint)
    scale.load_state(checkpoint.state["loss_scale"])
    torch.set_rng_state(random_state(checkpoint))


def is_done(checkpoint: Checkpoint, steps: int) -> bool:
    """Whether nothing is left to do. A run killed after its last checkpoint lacks its end: a sample, its last record.

    A lock file is left by a run that was killed before all this was on the disk.
    """
    folder = run_folder_of(checkpoint)
    if checkpoint.step != steps or folder is None:
        return checkpoint.step >= steps
    is_killed = os.path.lexists(folder / LOCK)
    return not is_killed and any("event" in record for record in read_lines(folder / "metrics.jsonl"))


def show_done(checkpoint: Checkpoint, steps: int) -> None:
    consolidate(checkpoint.path)  # in case the run was interrupted at its very end
    print(
        f"already done: {checkpoint.path} is step {checkpoint.step} of {steps}; a larger train.steps=N extends the run"
    )


def show_resume(
    checkpoint: Checkpoint, changes: list[str], saved: RunConfig, progress: Progress, config: RunConfig
) -> None:
    """changes: of `merge`. saved: of `saved_run`. progress: of `resumed_progress`."""
    print(f"resuming {checkpoint.path}: step {checkpoint.step}, {checkpoint.state['tokens']:,} tokens seen")
    sources = config.data.sources.items() if config.data.kind == "mixture" else [("", config.data)]
    for name, source in sources:  # before they are read, because their paths come from the checkpoint
        print(f"  data: {name + ': ' if name else ''}{source.kind} {source.path or ''}".rstrip())
    for change in changes + changed_own_parts(checkpoint, config.model, config.attention):
        print(f"  changed {change}")
    if line := describe_rate(progress_of(checkpoint), saved, progress, config):
        print(f"  {line}")


def check_data(checkpoint: Checkpoint, corpus: Corpus) -> None:
    """Raises UserError if the data of the resumed run differ from this run's."""
    if checkpoint.state["data"] != corpus.fingerprint:
        raise UserError(
            f"the data differ from the data of {checkpoint.path} (fingerprint {checkpoint.state['data'][:12]}, now "
            f"{corpus.fingerprint[:12]}); restore them, or start a new run with init_from={checkpoint.path}"
        )


def resumed_progress(
    checkpoint: Checkpoint, saved: RunConfig, config: RunConfig, left_auto: Collection[str]
) -> Progress:
    """The run's progress, with its length from now on: the planned one, unless the user now asks for another.

    saved: the result of `saved_run`. left_auto: see Plan.
    """
    before = progress = progress_of(checkpoint)
    step, planned, optimizer = before.step, before.planned_steps, saved.optimizer
    if saved.train.max_minutes is not None and is_open(step, planned, optimizer):  # planned is only the limit of then
        steps = relength(step, planned, 1, optimizer) if may_change(step, planned, optimizer) else step + 1
        progress = dataclasses.replace(before, planned_steps=max(config.steps, steps))
    if asked_length(saved, remembered_auto(checkpoint)) != asked_length(config, left_auto):
        progress = dataclasses.replace(progress, planned_steps=config.steps)
    same_length = progress.planned_steps == planned
    same_rates = same_length or step <= decay_start(planned, optimizer)
    same_recipe = same_rates and recipe_fingerprint(saved) == recipe_fingerprint(config)
    return dataclasses.replace(progress, follows_recipe=before.follows_recipe and same_recipe)


def remembered_auto(checkpoint: Checkpoint) -> list[str]:
    """The keys that the user of the checkpoint's run left `auto`."""
    return [key for key in checkpoint.state["left_auto"] if key in AUTO]


def asked_length(config: RunConfig, left_auto: Collection[str]) -> tuple[float | None, ...]:
    """The settings by which the user gave the run its length."""
    steps = None if "train.steps" in left_auto else config.steps
    return steps, config.train.flops, config.train.tokens_per_parameter


def describe_rate(before: Progress, saved: RunConfig, now: Progress, config: RunConfig) -> str | None:
    """A line on the learning rate's jump when a run, `before` as saved, goes on with another length; None without a jump."""
    step, steps = now.step, now.planned_steps
    if steps == before.planned_steps or not 0 < step < min(steps, before.planned_steps + 1):
        return None
    last, after = rate_at(step - 1, before.planned_steps, saved.optimizer), rate_at(step, steps, config.optimizer)
    if abs(after - last) < NOTICED_JUMP:
        return None
    return (
        f"learning rate: jumps from {last:.0%} to {after:.0%} of its peak, the value of "
        f"optimizer.schedule={config.optimizer.schedule} at step {step + 1} of {steps}"
    )


def progress_of(checkpoint: Checkpoint) -> Progress:
    return Progress(**{field.name: checkpoint.state[field.name] for field in dataclasses.fields(Progress)})


def saved_run(checkpoint: Checkpoint, config: RunConfig) -> RunConfig:
    """The configuration in the checkpoint, with the keys of OF_THIS_COMMAND from `config`."""
    saved = {key: value for key, value in checkpoint.state["config"].items() if key != "trust"}
    plain = to_plain(config)
    return parse(RunConfig, saved | {key: plain[key] for key in OF_THIS_COMMAND})


def merge(
    saved: dict,
    composed: dict,
    typed_groups: dict[str, str],
    typed_values: dict[str, Any],
    other_ranks: bool = False,
    left_auto: Collection[str] = (),
) -> tuple[dict, list[str]]:
    """The saved configuration, overridden by the typed values, and one line for each changed key.

    typed_groups: without those that the run has already chosen by the same name, whose saved values stay. A typed group
    replaces the saved group key by key; but if a key is `auto` in the typed group, the saved value stays. An interval that
    becomes `auto` again gets a line only in a dry run; otherwise the plan prints its new value.
    other_ranks: the number of ranks has changed, so the keys of OF_THE_RANKS are taken from `composed`.
    left_auto: keys that become `auto` again if a key that they depend on has changed.
    Raises UserError if a key of FIXED changes.
    """
    before, now = flatten(with_current_keys(RunConfig, saved)), flatten(composed)
    before.pop("trust", None)  # valid for one command line, never read from a checkpoint
    if other_ranks:
        before |= {key: value for key, value in now.items() if key.startswith(OF_THE_RANKS)}

    def is_typed(key: str) -> bool:  # or part of a typed mapping, such as data.sources
        return any(f"{key}.".startswith(f"{name}.") for name in (*typed_values, *OF_THIS_COMMAND))

    typed = {key for key in now if key.split(".")[0] in typed_groups or is_typed(key)}
    after = {key: value for key, value in before.items() if key in now or not is_typed(key)}
    after |= {key: now[key] for key in typed if is_typed(key) or now[key] != "auto"}
    set_now = {key for key in typed if now[key] != "auto"} | typed_values.keys()
    again = choose_again(after, differing(before, after), left_auto, set_now)
    after |= again
    changed = differing(before, after)
    for key in sorted(changed):
        is_path = key == "data.path" or (key.startswith("data.sources.") and key.endswith(".path"))
        if not is_path and any(f"{key}.".startswith(f"{fixed}.") for fixed in FIXED):
            raise UserError(
                f"{key}={as_typed(after.get(key))} cannot replace {key}={as_typed(before.get(key))} of the run to resume; "
                f"leave {key} out, or start a new run: from its weights, if they have the same shapes, with init_from=…"
            )
    planned = set() if after.get("dry_run") else {key for key in INTERVALS if key in again}
    told = sorted(changed - planned)
    return lay_over({}, after), [f"{key}: {as_typed(before.get(key))} → {as_typed(after.get(key))}" for key in told]


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The keys of the run whose values differ."""
    keys = (before.keys() | after.keys()).difference(OF_THIS_COMMAND)
    return {key for key in keys if same(before.get(key)) != same(after.get(key))}


def same(value: Any) -> Any:
    """A form for comparing values: a typed '1e-3' and a saved 0.001 become equal."""
    try:
        return float(value) if not isinstance(value, (bool, dict, list)) and value is not None else json.dumps(value)
    except (ValueError, OverflowError):  # a word; an integer beyond every float
        return str(value)


# ----------------------------------------------------------------------------------- a new run from the weights of another
# Its model and its tokenizer come with the weights, unless others are typed.

NOT_OF_THE_WEIGHTS = ("name", "recipe_steps", "recipe_tokens_per_step", "lora_rank")  # keys of `model`
NOT_INHERITED = {"attention": ("implementation",)}  # settings of the machine


def with_source(composed: dict[str, Any], groups: dict[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """`composed`, not parsed yet, with model, attention and tokenizer of init_from unless others were typed.

    groups, values: as typed. init_from becomes the path of the checkpoint that it names. Raises UserError.
    """
    source = source_of(composed["init_from"], composed["runs_dir"])
    model, attention = configs_of(source)
    model = dataclasses.replace(model, lora_rank=0)  # its factors become part of its weights
    plain = composed | {"init_from": str(source.path)}
    for group, saved in (("model", to_plain(model)), ("attention", to_plain(attention))):
        if group not in groups:
            kept = {key for key in saved if f"{group}.{key}" in values or key in NOT_INHERITED.get(group, ())}
            plain[group] = saved | {key: composed[group][key] for key in kept if key in composed[group]}
    if not any(key.split(".")[0] == "tokenizer" for key in (*groups, *values)):
        plain["tokenizer"] = tokenizer_keys(source, source.tokenizer())
    return plain


def with_teachers(composed: dict[str, Any]) -> dict[str, Any]:
    """`composed`, not parsed yet, with the path of a checkpoint for each of train.teachers. Raises UserError."""
    paths = [
        str(source_of(named, composed["runs_dir"], "train.teachers").path) for named in composed["train"]["teachers"]
    ]
    return composed | {"train": composed["train"] | {"teachers": paths}}


def source_of(named: Any, runs_dir: Any, key: str = "init_from") -> Checkpoint:
    """The checkpoint that `key` names; auto: the result of the newest run. Raises UserError."""
    report = print if torchrun.is_rank_0() else lambda line: None
    requested, place = readable_path(key, str(named)), readable_path("runs_dir", str(runs_dir))
    return locate(None if str(named) == "auto" else requested, Path(place), key=key, report=report)


def check_source(config: RunConfig) -> None:
    """Raises UserError if the weights of init_from do not fit the configured tokenizer and model. Reads headers alone."""
    source = read_checkpoint(Path(config.init_from))
    if config.objective.kind != "next_token" and not isinstance(source.tokenizer(), ChatTokenizer):
        raise UserError(
            f"objective={config.objective.kind} improves a model that answers already, and init_from={config.init_from} has no "
            f"tokens for turns; tune it on conversations first, with data=chat and without objective"
        )
    check_tokenizer(config, source.tokenizer())
    check_model(config, source)


def source_of_weights(config: RunConfig, tokenizer: Tokenizer) -> Checkpoint:
    """The checkpoint of init_from. Raises UserError if its tokenizer differs from `tokenizer`, that of this run's text."""
    source = read_checkpoint(Path(config.init_from))
    theirs = source.tokenizer()
    if tokenizer.identity not in (theirs.identity, for_chat(theirs).identity):  # a vocabulary that was trained just now
        raise wrong_tokenizer(config, theirs, tokenizer.identity)
    source.open_results()  # raises Damaged before the run begins
    return source


def tokenizer_keys(source: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """The values of the `tokenizer` group that describe the source's tokenizer."""
    if tokenizer.kind == "byte":
        path = str(source.path) if isinstance(tokenizer, ChatTokenizer) else None
        return {"kind": "byte", "vocab_size": None, "path": path}
    size = tokenizer.n_vocab if tokenizer.kind == "bpe" else None
    return {"kind": tokenizer.kind, "vocab_size": size, "path": str(source.path)}


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError if the configured tokenizer cannot be the tokenizer of the weights.

    If its vocabulary has yet to be trained, only the size is compared. `source_of_weights` compares the trained
    vocabulary.
    """
    ours = config.tokenizer
    known = configured_tokenizer(ours) if ours.path or ours.kind == "byte" else None
    if known is not None:
        fits, what = known.identity == tokenizer.identity, known.identity
    else:
        size = None if ours.vocab_size == "auto" else ours.vocab_size
        fits = ours.kind == tokenizer.kind and (size is None or size >= tokenizer.n_vocab)
        what = f"tokenizer={ours.kind}" + (f" tokenizer.vocab_size={size}" if size else "")
    if not fits:
        raise wrong_tokenizer(config, tokenizer, what)


def wrong_tokenizer(config: RunConfig, of_weights: Tokenizer, ours: str) -> UserError:
    return UserError(
        f"init_from={config.init_from} was trained with the tokenizer {of_weights.identity}, but this run uses {ours}; leave "
        f"tokenizer out to use the tokenizer of init_from"
    )


def check_model(config: RunConfig, source: Checkpoint) -> None:
    """Raises UserError, which names the keys that differ, if the weights do not have the shapes of the configured model."""
    reader = source.open_tensors(with_optimizer=False)
    found = {name: shape for name, shape in reader.shapes.items() if "/" not in name}
    (model, attention), tokenizer = configs_of(source), source.tokenizer()
    if model.lora_rank:
        check_shapes(source, found, tokenizer, model, attention)
        found = {name: shape for name, shape in found.items() if not is_factor(name)}
    try:
        check_shapes(source, found, tokenizer, dataclasses.replace(config.model, lora_rank=0), config.attention)
    except Damaged:
        ours, theirs = to_plain(config.model), to_plain(model)
        differ = {
            f"model.{key}": (ours[key], theirs[key])
            for key in theirs
            if ours[key] != theirs[key] and key not in NOT_OF_THE_WEIGHTS
        }
        if config.attention.compatibility != attention.compatibility:
            differ["attention.compatibility"] = config.attention.compatibility, attention.compatibility
        if not differ:
            raise
        listed = ", ".join(
            f"{key}={as_typed(mine)} (init_from has {as_typed(their)})" for key, (mine, their) in differ.items()
        )
        raise UserError(
            f"init_from={config.init_from} has weights of other shapes: {listed}; leave {' and '.join(differ)} out to use the "
            f"model of init_from"
        ) from None
