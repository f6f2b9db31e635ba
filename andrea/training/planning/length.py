"""Computes the length and the name of a run, before any data is prepared."""

from __future__ import annotations

import dataclasses

from andrea.config import ON_LARGE_TEXT, RunConfig, Text, UserError
from andrea.model.size import flops_per_token, parameters_without_bigrams
from andrea.text.load_tokenizer import configured_tokenizer
from andrea.training.records.console import format_number

GPT2_VOCABULARY = 50257  # tokens of tiktoken's gpt2, end-of-text included


def planned_vocabulary(config: RunConfig) -> int:
    """The vocabulary size of the tokenizer in `tokenizer.path`, or of the tokenizer that the run will make.

    For `auto` it is that of a large text: the text is not read yet.
    """
    if config.tokenizer.path:
        return configured_tokenizer(config.tokenizer).n_vocab
    if config.tokenizer.kind == "bpe":
        size = config.tokenizer.vocab_size
        assert size is not None
        return int(ON_LARGE_TEXT["tokenizer.vocab_size"]) if size == "auto" else size
    return 257 if config.tokenizer.kind == "byte" else GPT2_VOCABULARY


def with_length_and_name(config: RunConfig, resumed: bool = False) -> RunConfig:
    """Compute the steps from train.flops or train.tokens_per_parameter, and fill {model}, {tokens}, {seed} in the name.

    resumed: a number of steps is the one that was computed when the run began, and stays. It may differ from what would be
    computed now, because the text's vocabulary was not known then. Raises UserError if train.steps is given too and differs.
    """
    train = config.train
    has_length = resumed and train.steps != "auto"
    if not has_length and (train.tokens_per_parameter is not None or train.flops is not None):
        n_vocab = planned_vocabulary(config)
        if train.flops is not None:
            key, tokens = (
                f"flops={train.flops:g}",
                train.flops / flops_per_token(config.model, config.attention, n_vocab),
            )
        else:
            key = f"tokens_per_parameter={train.tokens_per_parameter:g}"
            tokens = train.tokens_per_parameter * parameters_without_bigrams(config.model, config.attention, n_vocab)
        steps = max(1, round(tokens / config.tokens_per_step))
        if train.steps not in ("auto", steps):
            raise UserError(
                f"train.steps={train.steps} and train.{key} (which gives {steps} steps) both set the length of training; "
                f"set train.steps=auto or leave one out"
            )
        config = dataclasses.replace(config, train=dataclasses.replace(train, steps=steps))
    if config.name is None:
        return config
    tokens = format_number(config.steps * config.tokens_per_step)
    name = str(config.name)
    for placeholder, value in {"{model}": config.model.name, "{tokens}": tokens, "{seed}": str(config.seed)}.items():
        name = name.replace(placeholder, value)
    return dataclasses.replace(config, name=Text(name))
