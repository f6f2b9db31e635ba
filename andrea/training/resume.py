"""Resumes a run: finds its checkpoint, and merges its saved configuration with the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.checkpoint import (
    Checkpoint,
    checkpoints_of,
    consolidate,
    locate,
    newest_run,
    newest_whole,
    read_checkpoint,
)
from andrea.checkpoint.model import changed_own_parts
from andrea.config import RunConfig, UserError, lay_over, with_current_keys
from andrea.model.gpt import GPT
from andrea.runtime import torchrun
from andrea.text.corpus import Corpus
from andrea.training.optimizer.loss_scale import LossScale
from andrea.training.parallel.saver import Saver
from andrea.training.progress import Progress
from andrea.training.records.recognise import run_folder_of

# Keys that a resumed run may not change: with other values it would be a different run.
FIXED = ("model", "attention.compatibility", "data.kind", "data.path", "data.sources", "tokenizer", "seed", "optimizer.kind",
         "train.tokens_per_step")  # fmt: skip
# Settings of the command, not of the run: never taken from the saved configuration.
OF_THIS_COMMAND = ("resume", "init_from", "dry_run", "name", "runs_dir", "data_dir")
# Settings that depend on the number of ranks: taken from the command line if this number changes.
OF_THE_RANKS = ("threads", "train.micro_batch", "parallel")


def find_resume(config: RunConfig) -> Checkpoint | None:
    """The checkpoint that `resume` names, or None for a new run. Raises UserError if that checkpoint does not exist."""
    if not config.resume:
        return None
    if config.resume != "auto":
        found = locate(config.resume, Path(config.runs_dir), key="resume")
        return newest_since_restart(found, config) if torchrun.is_restart() else found
    folder = Path(config.runs_dir) / config.name if config.name else newest_run(Path(config.runs_dir))
    if folder is None or not folder.is_dir():
        return None
    found = newest_whole(folder)
    if found is None and checkpoints_of(folder):  # a new run would remove checkpoints that may be repairable
        raise UserError(f"resume=auto: every checkpoint of {folder} is damaged; start a new run with another name=…")
    return found


def newest_since_restart(named: Checkpoint, config: RunConfig) -> Checkpoint:
    """The newest checkpoint that the run resumed from `named` has written before torchrun restarted it."""
    folder = run_folder_of(named) or (Path(config.runs_dir) / config.name if config.name else None)
    return (newest_whole(folder) if folder else None) or named


def without_run(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as the start of a run in another folder, with its own best checkpoint and its own wandb run."""
    return dataclasses.replace(checkpoint, state=checkpoint.state | {"run": None, "best_bpb": None, "wandb_id": None})


def is_done(checkpoint: Checkpoint, steps: int) -> bool:
    return checkpoint.step >= steps


def show_done(checkpoint: Checkpoint, steps: int) -> None:
    consolidate(checkpoint.path)  # in case the run was interrupted at its very end
    print(f"already done: {checkpoint.path} is step {checkpoint.step} of {steps}")


def show_resume(checkpoint: Checkpoint, changes: list[str], config: RunConfig) -> None:
    print(f"resuming {checkpoint.path}: step {checkpoint.step}, {checkpoint.state['tokens']:,} tokens seen")
    for change in changes + changed_own_parts(checkpoint, config.model, config.attention):
        print(f"  changed {change}")


def starting_weights(config: RunConfig, corpus: Corpus, checkpoint: Checkpoint | None) -> dict[str, Tensor] | None:
    """The weights of init_from, or None without it. None for a resumed run too: `restore` loads its weights.

    Raises UserError if the data of the resumed run, or the tokenizer or shapes of init_from, differ from this run's.
    """
    if checkpoint is not None:
        if checkpoint.state["data"] != corpus.fingerprint:
            raise UserError(
                f"the data differ from those of {checkpoint.path} (fingerprint {checkpoint.state['data'][:12]}, now "
                f"{corpus.fingerprint[:12]}); restore them, or start a new run with init_from={checkpoint.path}"
            )
        return None
    if not config.init_from:
        return None
    source = read_checkpoint(Path(config.init_from))
    if source.state["tokenizer"] != corpus.tokenizer.identity:
        raise UserError(
            f"init_from={config.init_from} was trained with the tokenizer {source.state['tokenizer']}, but this run uses "
            f"{corpus.tokenizer.identity}; set tokenizer.path={config.init_from} or choose its tokenizer"
        )
    weights = source.model_tensors()
    with torch.device("meta"):
        model = GPT(config.model, config.attention, corpus.tokenizer.n_vocab, corpus.tokenizer.end_of_text)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if {name: tensor.shape for name, tensor in weights.items()} != expected:
        name = source.state["config"]["model"]["name"]
        raise UserError(
            f"init_from={config.init_from} holds the model {name}, whose shapes differ from those of "
            f"model={config.model.name}; choose model={name}"
        )
    return weights


def restore(checkpoint: Checkpoint, saver: Saver, scale: LossScale) -> Progress:
    """Load weights, optimizer state, loss scale and random state from the checkpoint. Returns the run's progress."""
    state = checkpoint.state
    saver.restore(checkpoint)
    scale.load_state(state["loss_scale"])
    torch.set_rng_state(torch.tensor(state["torch_random"], dtype=torch.uint8))
    state = {"compared_bpb": state["val_bpb"]} | state  # checkpoints of version 0.2 and before have no compared_bpb
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


def merge(
    saved: dict, composed: dict, typed_groups: dict[str, str], typed_values: dict[str, Any], other_ranks: bool = False
) -> tuple[dict, list[str]]:
    """The saved configuration, overridden by the typed values, and one line for each changed key.

    A typed group replaces the saved group key by key; but for a key that is `auto` in the typed group, the saved value
    stays. other_ranks: the number of ranks has changed, so the keys of OF_THE_RANKS are taken from `composed`.
    Raises UserError if a key of FIXED changes.
    """
    saved = with_current_keys(RunConfig, saved)
    before, now = flatten(saved), flatten(composed)
    before.pop("trust", None)  # valid for one command line, never read from a checkpoint
    if other_ranks:
        before |= {key: value for key, value in now.items() if key.startswith(OF_THE_RANKS)}
    before = {key: value for key, value in now.items() if key.split(".")[0] not in saved} | before  # newer groups
    typed = {key for key in now if key.split(".")[0] in typed_groups or key in typed_values or key in OF_THIS_COMMAND}
    after = dict(before)
    for key in typed:
        settled = now[key] == "auto" and key not in typed_values and key not in OF_THIS_COMMAND
        if not settled:
            after[key] = now[key]
    merged = lay_over({}, after)
    changed = {key for key in after if key not in OF_THIS_COMMAND and same(before.get(key)) != same(after[key])}
    for key in sorted(changed):
        if any(key == fixed or key.startswith(fixed + ".") for fixed in FIXED):
            raise UserError(
                f"{key}={after[key]} cannot replace {key}={before.get(key)} of the run to resume; leave {key} out, "
                f"or start a new run from its weights with init_from=…"
            )
    return merged, [f"{key}: {before.get(key)} → {after[key]}" for key in sorted(changed)]


def same(value: Any) -> Any:
    """A form for comparing values: a typed '1e-3' and a saved 0.001 become equal."""
    try:
        return float(value) if not isinstance(value, (bool, dict, list)) and value is not None else json.dumps(value)
    except ValueError:
        return str(value)


def flatten(nested: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
