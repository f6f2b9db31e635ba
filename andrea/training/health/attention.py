"""Measures the attention heads during training: the figures that are logged, and what the health checks judge.

L layers, H heads. The definitions of the figures are in andrea/attention/statistics.py. `attention/…` is measured on the
probe, a fixed batch of held-out text, in fp32, so that runs on the same data can be compared even if they train with
different implementations. `attention/step/…` is measured in the training step itself, if `measures_every_step` is true.

Two more figures show how a model learns to use its context: the scores of each head's patterns, which are measured on
fixed texts (andrea/insight/lens/scores.py), and the in-context score, which is measured on the probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.attention.implementations.triton import kernel_errors
from andrea.config import AttentionConfig
from andrea.model.gpt import GPT
from andrea.runtime.files import lines_of
from andrea.text.corpus import Corpus
from andrea.text.loader import validation_batches
from andrea.text.shards import IGNORED_TARGET
from andrea.text.tokenizer import Tokenizer
from andrea.training.loss.loss import loss_sum_from_hidden

PROBE_TOKENS = 2048  # in the probe, at most; but at least one sequence of each source
LATE_PART = 10  # the last tenth of each sequence is late in its context
ScoreHeads = Callable[[GPT, Tokenizer], Mapping[str, Tensor]]  # name of a pattern -> score (L, H) of each head


def probe_batch(corpus: Corpus, sequence_length: int) -> tuple[Tensor, Tensor]:
    """The probe: tokens and targets of B sequences, (B, T) int64 each, the first held-out ones of every source."""
    each = max(1, PROBE_TOKENS // sequence_length // len(corpus.sources))
    batches = [
        next(validation_batches(source.val, sequence_length, each, chat=source.chat)) for source in corpus.sources
    ]
    tokens, targets = zip(*batches, strict=True)
    return torch.cat(tokens), torch.cat(targets)


class Probed(NamedTuple):
    heads: HeadStatistics  # (L, H)
    hidden: Tensor  # (B, T, d_model), after the final norm


@torch.no_grad()
def probe(model: GPT, tokens: Tensor, say: Callable[[str], None] | None = None) -> Probed:
    """Runs the model over tokens (B, T) and measures its heads, in the precision of the weights: fp32 during training.

    Every run is measured, also one that trains with another implementation. A fused kernel that fails here must not end
    such a run: then the textbook formula measures, and `say` is told why. Without `say`, the error is raised.
    """
    try:
        return statistics_of(model, tokens)
    except (RuntimeError, *kernel_errors()) as error:
        if say is None or isinstance(error, torch.OutOfMemoryError):  # the textbook formula would need more memory
            raise
        why = lines_of(str(error).strip() or repr(error))[0]
        say(f"the attention heads are measured by the textbook formula, because the kernel failed: {why}")
    layers = [block.attention for block in model.blocks]
    before = [layer.implementation for layer in layers]
    try:
        for layer in layers:
            layer.implementation = "reference"
        return statistics_of(model, tokens)
    finally:
        for layer, its_own in zip(layers, before, strict=True):
            layer.implementation = its_own


def statistics_of(model: GPT, tokens: Tensor) -> Probed:
    """Sequences are processed one at a time, because some implementations must materialise the scores (H, T, T)."""
    heads, hidden = None, []
    for sequence in tokens.split(1):
        of_sequence, layers = model(sequence, statistics=True)
        measured = HeadStatistics.of_layers(layers)
        heads = measured if heads is None else heads.merged(measured)
        hidden.append(of_sequence)
    return Probed(heads, torch.cat(hidden))


@torch.no_grad()
def in_context_nats(model: GPT, tokens: Tensor, targets: Tensor, hidden: Tensor) -> float:
    """How much a long context helps, in nats per token: negative if it helps, 0 for a model that uses none of it.

    This is the loss of the targets in the last tenth of each sequence, minus the loss of the same targets at the end of a
    sequence a fifth as long. tokens, targets (B, T); hidden (B, T, d_model): of the probe. NaN if there are no targets.

    Source: the in-context score of Olsson et al. 2022, arXiv 2209.11895: the loss of the 500th token of a context minus
    that of the 50th. Here both losses are of the same tokens, so that the figure does not depend on which text is where.
    """
    n_late = max(1, tokens.shape[1] // LATE_PART)
    targets = targets[:, -n_late:]
    early_hidden = probe(model, tokens[:, -2 * n_late :]).hidden
    late, early = (  # sequences one at a time: logits (1, n_late, V) are large
        sum(map(loss_sum_from_hidden, [model] * len(targets), each[:, -n_late:].split(1), targets.split(1)))
        for each in (hidden, early_hidden)
    )
    return float((late - early) / (targets != IGNORED_TARGET).sum())


def score_figures(scores: Mapping[str, Tensor]) -> dict[str, float | None | list[list[float | None]]]:
    """The recorded figures of the scores (L, H) of each pattern: `attention/heads/NAME_score`, and the highest one.

    A score is a share of a head's weight. Three digits keep the records small.
    """
    figures = {}
    for name, score in scores.items():
        rows = [[finite_or_none(round(number, 3)) for number in row] for row in score.tolist()]
        figures[f"attention/heads/{name}_score"] = rows
        figures[f"attention/highest_{name}_score"] = max(
            (number for row in rows for number in row if number is not None), default=None
        )
    return figures


def scalars(heads: HeadStatistics, group: str = "attention") -> dict[str, float | None]:
    """Figures over all layers and heads, named `group/…`: means, and extremes where a single head matters."""
    figures = heads.figures()
    mean = {name: value.nanmean() for name, value in figures.items() if name != "largest_logit"}
    extremes = {
        "largest_logit": figures["largest_logit"].amax(),
        "lowest_entropy_share": lowest(figures["entropy_share"]),
        "highest_first_token_mass": -lowest(-figures["first_token_mass"]),
        "highest_previous_token_mass": -lowest(-figures["previous_token_mass"]),
    }
    if "gate_mean" in figures:
        extremes["lowest_gate_mean"] = lowest(figures["gate_mean"])
    return {f"{group}/{name}": finite_or_none(float(value)) for name, value in (mean | extremes).items()}


def heatmaps(heads: HeadStatistics) -> dict[str, list[list[float | None]]]:
    """The figures of each head, named `attention/heads/…`: L rows of H numbers each."""
    return {
        f"attention/heads/{name}": [[finite_or_none(number) for number in row] for row in value.tolist()]
        for name, value in heads.figures().items()
    }


def lowest(values: Tensor) -> Tensor:
    """The smallest number that is not NaN, 0-dim."""
    return values.nan_to_num(nan=math.inf).amin()


def finite_or_none(number: float) -> float | None:
    """The number, or None (null in JSON) for the NaN of a head without counted queries."""
    return number if math.isfinite(number) else None


def measures_every_step(attention: AttentionConfig) -> bool:
    """Whether every training step measures the heads: Triton's kernel without an extra pass, and any other for QK-clip."""
    return attention.implementation == "triton" or attention.qk_clip is not None
