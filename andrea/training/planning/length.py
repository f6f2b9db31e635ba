"""How long a run is, and the name that follows from it: known before any data is prepared."""

from __future__ import annotations

import dataclasses

from andrea.config import RunConfig, Text, UserError
from andrea.model.size import count_parameters, flops_per_token
from andrea.text.tokenizer import configured_tokenizer
from andrea.training.records.format import format_number

GPT2_VOCABULARY = 50257  # tokens of tiktoken's gpt2, end-of-text included


def planned_vocabulary(config: RunConfig) -> int:
    """Tokens in the vocabulary: of the tokenizer that `tokenizer.path` names, or of the one that will be made."""
    if config.tokenizer.path:
        return configured_tokenizer(config.tokenizer).n_vocab
    if config.tokenizer.kind == "bpe":
        assert config.tokenizer.vocab_size is not None
        return config.tokenizer.vocab_size
    return 257 if config.tokenizer.kind == "byte" else GPT2_VOCABULARY


def with_length_and_name(config: RunConfig) -> RunConfig:
    """Fill in the steps, where FLOPs or tokens per parameter are given, and {model}, {tokens} and {seed} in the name.

    Raises UserError where train.steps contradicts them.
    """
    train = config.train
    if train.tokens_per_parameter is not None or train.flops is not None:
        n_vocab = planned_vocabulary(config)
        if train.flops is not None:
            key, tokens = (
                f"flops={train.flops:g}",
                train.flops / flops_per_token(config.model, config.attention, n_vocab),
            )
        else:
            key = f"tokens_per_parameter={train.tokens_per_parameter:g}"
            tokens = train.tokens_per_parameter * count_parameters(config.model, config.attention, n_vocab).total
        steps = max(1, round(tokens / config.tokens_per_step))
        if train.steps not in ("auto", steps):
            raise UserError(
                f"train.steps={train.steps} and train.{key}, which makes {steps}; set train.steps=auto or leave one out"
            )
        config = dataclasses.replace(config, train=dataclasses.replace(train, steps=steps))
    if config.name is None:
        return config
    tokens = format_number(config.steps * config.tokens_per_step)
    name = str(config.name)
    for placeholder, value in {"{model}": config.model.name, "{tokens}": tokens, "{seed}": str(config.seed)}.items():
        name = name.replace(placeholder, value)
    return dataclasses.replace(config, name=Text(name))
