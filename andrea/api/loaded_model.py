"""A trained model in Python: generate text, read logits, score text, and read attention weights.

T tokens, V vocabulary, L layers, H heads.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from andrea.checkpoint import Checkpoint, locate
from andrea.checkpoint.model import load_model
from andrea.config import SampleConfig, UserError, parse, to_plain
from andrea.config.keys import suggestion
from andrea.generation.engine import Engine
from andrea.generation.session import describe, make_engine, request_of
from andrea.insight.lens.trace import trace_layers
from andrea.model.gpt import GPT
from andrea.runtime.device import WEIGHT_DTYPE, choose_device, choose_precision
from andrea.runtime.own_parts import allowing
from andrea.text.loader import count_windows, validation_batches
from andrea.text.tokenizer import Tokenizer
from andrea.training.evaluation import summary, sums_over
from andrea.training.loss.micro_batch import training_loss_sum

TextOrIds = str | Sequence[int] | np.ndarray | Tensor
# The keys of configs/sample.yaml that `generate` and `stream` accept.
GENERATE_KEYS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "lookahead",
    "seed",
    "stop",
)
WINDOWS_AT_ONCE = 8  # windows of T tokens that `score` reads in one pass


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
    found = locate(config.checkpoint, Path(config.runs_dir), report=lambda line: print(line, file=sys.stderr))
    tokenizer = found.tokenizer()
    with allowing((), config.trust):
        model = load_model(found, tokenizer).to(choose_device(config.device))
    for block in model.blocks:
        block.attention.implementation = "auto"  # this device may lack the implementation that trained the model
    return LoadedModel(found, model, tokenizer, config)


@functools.cache
def default_values() -> dict[str, Any]:
    """The keys and values of configs/sample.yaml."""
    from andrea.cli.command_line import configure

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
        asked = self.settings.precision
        precision = choose_precision("auto" if asked == "int8" else asked, self.device)
        return make_engine(self.settings, self.model, self.tokenizer, WEIGHT_DTYPE[precision.value])

    def generate(self, prompt: TextOrIds = "", **keywords: Any) -> str:
        """The text that follows the prompt, without the prompt.

        keywords: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, lookahead, seed and stop, as in
        configs/sample.yaml, which holds their defaults. Raises UserError.
        """
        return "".join(self.stream(prompt, **keywords))

    def stream(self, prompt: TextOrIds = "", **keywords: Any) -> Iterator[str]:
        """The text of `generate` in pieces, as soon as each is generated. Raises UserError before the first piece."""
        request = request_of(self.with_keywords(keywords))
        tokens = self.tokens_of(prompt)
        return (token.text for token in self.engine.stream(tokens, request) if token.text)

    def logits(self, text: TextOrIds) -> Tensor:
        """Logits (T, V) fp32: row t holds the scores of the token after token t. Raises UserError."""
        with torch.no_grad():
            return self.model.logits(self.model(self.batch_of(text)))[0].float()

    def score(self, text: TextOrIds) -> float:
        """Bits per byte of the text: -log2 of its probability, divided by its UTF-8 bytes.

        The text may be longer than the model's window. It is cut into windows of sequence_length tokens, and each token
        is predicted only from its own window, as in a run's evaluation (`val/bpb`). If ids are given, the first id is
        not predicted. Raises UserError if no byte is predicted.
        """
        if isinstance(text, str):
            ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(text)]
        else:
            ids = self.checked_ids(text)
        bytes_of_token = torch.from_numpy(self.tokenizer.byte_lengths())
        if not int(bytes_of_token[ids[1:]].sum()):
            raise UserError("score needs at least one byte of text, got none; give some text, or at least two ids")
        stream, length = np.array(ids), self.model.config.sequence_length
        batch = min(WINDOWS_AT_ONCE, count_windows(stream, length))
        with torch.no_grad():
            sums = sums_over(
                validation_batches(stream, length, batch),
                lambda tokens, targets: training_loss_sum(self.model, self.model(tokens), targets, "fp32"),
                bytes_of_token,
                self.device,
            )
        return summary(*sums)["bpb"]

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

    def tokens_of(self, text: TextOrIds) -> list[int]:
        """The token ids of `text`, at least one and at most sequence_length. Raises UserError."""
        if isinstance(text, str):
            return Engine(self.model, self.tokenizer).encode(text)  # without a dtype it copies no weights
        ids, most = self.checked_ids(text), self.model.config.sequence_length
        if not 1 <= len(ids) <= most:
            raise UserError(f"got {len(ids)} ids; the model reads from 1 to model.sequence_length={most}")
        return ids

    def checked_ids(self, ids: TextOrIds) -> list[int]:
        """`ids` as a list. Raises UserError unless they are one-dimensional and all are ids of the tokenizer."""
        values = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise UserError(f"got {type(ids).__name__}; give text, or token ids: a list of whole numbers")
        outside = values[(values < 0) | (values >= self.tokenizer.n_vocab)]
        if outside.size:
            raise UserError(
                f"{outside[0]} is not a token id; the tokenizer has ids from 0 to {self.tokenizer.n_vocab - 1}"
            )
        return [int(value) for value in values]

    def batch_of(self, text: TextOrIds) -> Tensor:
        """The token ids as a batch, (1, T) int64, on the model's device."""
        return torch.tensor([self.tokens_of(text)], device=self.device)
