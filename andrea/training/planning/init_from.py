"""A new run from the weights of another: its model and its tokenizer come with the weights, unless others are typed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from andrea.checkpoint import Checkpoint, Damaged, locate, read_checkpoint
from andrea.checkpoint.model import check_shapes, configs_of
from andrea.config import RunConfig, UserError, readable_path, to_plain
from andrea.model.lora import is_factor
from andrea.runtime import torchrun
from andrea.text.chat import ChatTokenizer, for_chat
from andrea.text.load_tokenizer import configured_tokenizer
from andrea.text.tokenizer import Tokenizer

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
    paths = {key: str(named), "runs_dir": str(runs_dir)}
    requested, place = (readable_path(name, path) for name, path in paths.items())
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
        listed = ", ".join(f"{key}={mine} (init_from has {their})" for key, (mine, their) in differ.items())
        raise UserError(
            f"init_from={config.init_from} has weights of other shapes: {listed}; leave {' and '.join(differ)} out to use the "
            f"model of init_from"
        ) from None
