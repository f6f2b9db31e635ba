"""A trained model in Python: text, logits, scores, attention weights. T tokens, V vocabulary, L layers, H heads."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from andrea.api.command_line import configure
from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import open_model
from andrea.config import SampleConfig, UserError, parse, to_plain
from andrea.config.keys import suggestion
from andrea.generation.engine import Engine
from andrea.generation.sample_command import (
    check_batch,
    describe,
    last_tokens,
    make_engine,
    request_of,
    stream_in_batches,
)
from andrea.insight.lens.trace import trace_layers
from andrea.model.gpt import GPT
from andrea.runtime.device import choose_device
from andrea.text.loader import validation_batches
from andrea.text.shards import IGNORED_TARGET, TextWindows
from andrea.text.tokenizer import Tokenizer

TextOrIds = str | Sequence[int] | np.ndarray | Tensor
# The keys of configs/sample.yaml that `generate` and `stream` accept.
GENERATE_KEYS = "max_new_tokens temperature top_k top_p min_p repetition_penalty lookahead seed stop".split()
WINDOWS_AT_ONCE = 8  # windows of T tokens that `log_probabilities` reads in one pass
LARGEST_LOGITS = 1 << 25  # numbers that are computed at once: 128 MiB


def load(
    checkpoint: str | os.PathLike | None = None,
    *,
    device: str = "auto",
    runs_dir: str | os.PathLike = "runs",
    precision: str = "auto",
    trust: bool = False,
) -> LoadedModel:
    """Load a trained model.

    checkpoint: a checkpoint folder, a run folder, or a run's name under `runs_dir`; None means the newest run. For a
    run, the checkpoint with the best evaluation is loaded, as by sample.py.
    device, precision: like the keys in configs/sample.yaml. precision applies to `generate` and `stream`; all other
    methods compute in fp32.
    trust: import the modules that the checkpoint names for its MLP or compatibility function, which runs their code.

    Raises UserError if there is no such checkpoint, or if it is damaged.
    """
    settings = {
        "checkpoint": None if checkpoint is None else os.fspath(checkpoint),
        "runs_dir": os.fspath(runs_dir),
        "device": str(device),
        "precision": precision,
        "trust": trust,
    }
    config = parse(SampleConfig, default_values() | settings)
    opened = open_model(config.checkpoint, config.runs_dir, choose_device(config.device), config.trust)
    return LoadedModel(*opened, config)


@functools.cache
def default_values() -> dict[str, Any]:
    """The keys and values of configs/sample.yaml."""
    return to_plain(configure(SampleConfig, "sample", []))


@final
class LoadedModel:
    """A model from a checkpoint, with its tokenizer, in evaluation mode and without gradients.

    checkpoint: its folder (`checkpoint.path`), step and recorded state. model: the GPT, in fp32. config: the run's
    configuration as nested mappings, as in its config.yaml.

    Every method that takes text also takes token ids. Text is read as the beginning of a document: an end-of-text token
    is put before it, as in training, unless the text fills the window. Ids are used unchanged.
    """

    def __init__(self, checkpoint: Checkpoint, model: GPT, tokenizer: Tokenizer, settings: SampleConfig) -> None:
        self.checkpoint = checkpoint
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.config: dict[str, Any] = checkpoint.state["config"]

    def __repr__(self) -> str:
        return describe(self.checkpoint, self.model, self.tokenizer, str(self.device))

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @functools.cached_property
    def engine(self) -> Engine:
        """Generates text, with a copy of the weights in `precision` that is made on first use."""
        return make_engine(self.model, self.tokenizer, self.settings.precision, self.settings.compile)

    def generate(self, prompt: TextOrIds | Sequence[TextOrIds] = "", **keywords: Any) -> str | list[str]:
        """The text that follows the prompt, without the prompt; for a list of prompts, a list of texts.

        keywords: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, lookahead, seed and stop, as in
        configs/sample.yaml, which holds their defaults. The model reads at most the last sequence_length tokens of a
        prompt; if a prompt is longer, a line on standard error says so, as by sample.py.

        The prompts of a list are continued in batches that memory holds. Text i has the seed `seed + i`: it is the text of
        `generate(prompts[i], seed=seed + i)`, except for rounding, which may choose another token where two are almost
        equally likely. Raises UserError.
        """
        if not is_list_of_prompts(prompt):
            return "".join(self.stream(prompt, **keywords))
        settings = self.with_keywords(keywords)
        check_batch(len(prompt), settings.max_new_tokens, "the list")
        texts = [""] * len(prompt)
        tokens = [self.prompt_tokens(each) for each in prompt]
        for token in stream_in_batches(self.engine, tokens, request_of(settings)):
            texts[token.sample] += token.text
        return texts

    def stream(self, prompt: TextOrIds = "", **keywords: Any) -> Iterator[str]:
        """The text of `generate` for one prompt, piece by piece as it is written. Raises UserError before the first piece."""
        request = request_of(self.with_keywords(keywords))
        tokens = self.prompt_tokens(prompt)
        return (token.text for token in self.engine.stream(tokens, request) if token.text)

    def logits(self, text: TextOrIds) -> Tensor:
        """Logits (T, V) fp32: row t holds the scores of the token after token t. Raises UserError."""
        with torch.no_grad():
            return self.model.logits(self.model(self.batch_of(text)))[0].float()

    def log_probabilities(self, text: TextOrIds) -> Tensor:
        """The log-probability of each token, in nats, given the tokens before it: (N,) fp32 on the CPU, at most 0.

        For text, entry i belongs to token i of `tokenizer.encode(text)`; for N + 1 ids, to ids[i + 1]: the first id is not
        predicted. The text may be longer than the model's window. It is cut into windows of sequence_length tokens, and
        each token is predicted only from its own window, as in a run's evaluation. Raises UserError for wrong ids.
        """
        ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(text)] if isinstance(text, str) else self.ids_of(text)
        if len(ids) < 2:
            return torch.zeros(0)
        stream, length = np.array(ids), self.model.config.sequence_length
        most = max(1, LARGEST_LOGITS // (length * self.model.n_vocab))
        batches = validation_batches(stream, length, min(WINDOWS_AT_ONCE, most, len(TextWindows(stream, length))))
        with torch.inference_mode():
            return torch.cat([self.nats_of(*batch) for batch in batches])

    def nats_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets (B, T) -> the log-probabilities of the targets that count, in their order."""
        log_probabilities = self.model.logits(self.model(tokens.to(self.device))).float().log_softmax(-1)  # (B, T, V)
        counts = targets != IGNORED_TARGET
        found = log_probabilities.cpu().gather(-1, targets.where(counts, 0)[..., None])[..., 0]
        return found[counts]

    def score(self, text: TextOrIds) -> float:
        """Bits per byte of the text: minus the sum of `log_probabilities` in bits, divided by its UTF-8 bytes.

        It can be compared with `val/bpb` of a run. If ids are given, the first id is not predicted. Raises UserError if
        no byte is predicted.
        """
        ids = self.tokenizer.encode(text) if isinstance(text, str) else self.ids_of(text)[1:]
        n_byte = int(self.tokenizer.byte_lengths()[ids].sum())
        if not n_byte:
            raise UserError("score needs at least one byte of text, got none; give some text, or at least two ids")
        return -float(self.log_probabilities(text).sum(dtype=torch.float64)) / math.log(2) / n_byte

    def hidden_states(self, text: TextOrIds) -> Tensor:
        """The residual stream (L + 1, T, d_model) fp32: entry 0 is what the first layer reads, entry l the sum after layer l.

        `model.model.final_norm` of the last entry is what the output head reads. Raises UserError.
        """
        with torch.inference_mode():
            x, shared = self.model.block_inputs(self.batch_of(text))
            states = [x]
            for block in self.model.blocks:
                states.append(block(states[-1], shared)[0])
            return torch.cat(states)

    def attention(self, text: TextOrIds) -> Tensor:
        """Attention weights (L, H, T, T) by layer and head: one row per query, over all keys. Raises UserError."""
        return torch.stack([layer.weights[0] for layer in trace_layers(self.model, self.batch_of(text))])

    # -------------------------------------------------------------------------------------------- the caller's input

    def with_keywords(self, keywords: dict[str, Any]) -> SampleConfig:
        """The settings, overridden by `keywords` after a check. Raises UserError."""
        for key in keywords:
            if key not in GENERATE_KEYS:
                near = suggestion(SampleConfig, key, GENERATE_KEYS)
                raise UserError(f"unknown keyword {key}; allowed: {', '.join(GENERATE_KEYS)}{near}")
        return parse(SampleConfig, to_plain(self.settings) | keywords)

    def prompt_tokens(self, prompt: TextOrIds) -> list[int]:
        """The tokens that the model reads of a prompt: at least one, and at most the last sequence_length. Raises UserError."""
        tokens = last_tokens(self.engine, prompt if isinstance(prompt, str) else self.ids_of(prompt))
        if not tokens:
            raise UserError("got no ids; give at least one id, or a text, which may be empty")
        return tokens

    def ids_of(self, ids: TextOrIds) -> list[int]:
        """`ids` as a list. Raises UserError unless they are one-dimensional and all are ids of the tokenizer."""
        values = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise UserError(f"got {type(ids).__name__}; give text, or token ids: a list of whole numbers")
        outside = values[(values < 0) | (values >= self.tokenizer.n_vocab)]
        if outside.size:
            raise UserError(f"{outside[0]} is not a token id; allowed: 0 to {self.tokenizer.n_vocab - 1}")
        return [int(value) for value in values]

    def batch_of(self, text: TextOrIds) -> Tensor:
        """The token ids as a batch (1, T) int64 on the model's device, 1 ≤ T ≤ sequence_length. Raises UserError."""
        most = self.model.config.sequence_length
        # Without a dtype, the engine copies no weights.
        ids = Engine(self.model, self.tokenizer).encode(text) if isinstance(text, str) else self.ids_of(text)
        if not 1 <= len(ids) <= most:
            raise UserError(f"got {len(ids)} ids; the model reads from 1 to model.sequence_length={most}")
        return torch.tensor([ids], device=self.device)


def is_list_of_prompts(prompt: Any) -> bool:
    """Whether the prompt is a list of texts or of lists of ids. A list of numbers is one prompt, as ids."""
    return isinstance(prompt, (list, tuple)) and any(not isinstance(each, (int, float, np.number)) for each in prompt)
