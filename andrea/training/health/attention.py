"""Measures the attention heads during training: the figures that are logged, and what the health checks judge.

L layers, H heads. The definitions of the figures are in andrea/attention/statistics.py. `attention/…` is measured on the
probe, a fixed batch of held-out text, in fp32, so that runs on the same data can be compared even if they train with
different implementations. `attention/step/…` is measured in the training step itself, if `measures_every_step` is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.attention.implementations.triton import kernel_errors
from andrea.config import AttentionConfig
from andrea.model.gpt import GPT
from andrea.runtime.files import lines_of
from andrea.text.corpus import Corpus
from andrea.text.loader import validation_batches

PROBE_TOKENS = 2048  # in the probe, at most; but at least one sequence of each source


def probe_batch(corpus: Corpus, sequence_length: int) -> Tensor:
    """The probe, B sequences of T tokens, (B, T) int64: the first held-out sequences of every source."""
    each = max(1, PROBE_TOKENS // sequence_length // len(corpus.sources))
    return torch.cat(
        [next(validation_batches(source.val, sequence_length, each, chat=source.chat))[0] for source in corpus.sources]
    )


@torch.no_grad()
def probe(model: GPT, tokens: Tensor, say: Callable[[str], None] | None = None) -> HeadStatistics:
    """The statistics (L, H) of the heads over tokens (B, T), in the precision of the weights: fp32 during training.

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


def statistics_of(model: GPT, tokens: Tensor) -> HeadStatistics:
    """Sequences are processed one at a time, because some implementations must materialise the scores (H, T, T)."""
    heads = None
    for sequence in tokens.split(1):
        _, layers = model(sequence, statistics=True)
        measured = HeadStatistics.of_layers(layers)
        heads = measured if heads is None else heads.merged(measured)
    return heads


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
