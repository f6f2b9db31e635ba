"""Measurements of the attention heads during training, and the figures of them that are logged.

L layers, H heads. The definitions of the figures are in andrea/attention/statistics.py. `attention/…` is measured on the
probe, a fixed batch of held-out text, in fp32, so that runs on the same data can be compared whatever implementation
trains them. `attention/step/…` is measured on the training step itself, where the implementation measures its heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import AttentionConfig
from andrea.model.gpt import GPT
from andrea.text.corpus import Corpus
from andrea.text.loader import validation_batches

PROBE_TOKENS = 2048  # of the probe, at most; it has at least one sequence of each source


def probe_batch(corpus: Corpus, sequence_length: int) -> Tensor:
    """The probe: the first held-out sequences of every source, (B, T) int64, the same in every run on these data."""
    each = max(1, PROBE_TOKENS // sequence_length // len(corpus.sources))
    return torch.cat([next(validation_batches(source.val, sequence_length, each))[0] for source in corpus.sources])


@torch.no_grad()
def probe(model: GPT, tokens: Tensor) -> HeadStatistics:
    """The statistics (L, H) of the heads over tokens (B, T), in the precision of the weights: fp32 during training.

    One sequence at a time, because an implementation that cannot measure writes out its (H, T, T) scores.
    """
    heads = None
    for sequence in tokens.split(1):
        _, layers = model(sequence, statistics=True)
        measured = HeadStatistics.of_layers(layers)
        heads = measured if heads is None else heads.merged(measured)
    return heads


def scalars(heads: HeadStatistics, group: str = "attention") -> dict[str, float | None]:
    """Figures over all layers and heads, as `group/…`: means, and the extreme where a single head matters."""
    figures = heads.figures()
    mean = {name: value.nanmean() for name, value in figures.items() if name != "largest_logit"}
    extremes = {
        "largest_logit": figures["largest_logit"].amax(),
        "lowest_entropy_share": lowest(figures["entropy_share"]),
        "highest_first_token_mass": -lowest(-figures["first_token_mass"]),
        "highest_previous_token_mass": -lowest(-figures["previous_token_mass"]),
    }
    return {f"{group}/{name}": finite_or_none(float(value)) for name, value in (mean | extremes).items()}


def heatmaps(heads: HeadStatistics) -> dict[str, list[list[float | None]]]:
    """The figures of each head, as `attention/heads/…`: L rows of H numbers each."""
    return {
        f"attention/heads/{name}": [[finite_or_none(number) for number in row] for row in value.tolist()]
        for name, value in heads.figures().items()
    }


def lowest(values: Tensor) -> Tensor:
    """The smallest number that is not NaN, 0-dim."""
    return values.nan_to_num(nan=math.inf).amin()


def finite_or_none(number: float) -> float | None:
    """None, which JSON writes as null, for a head's figure that no query counted for."""
    return number if math.isfinite(number) else None


def measures_every_step(attention: AttentionConfig) -> bool:
    """Our kernel measures the heads in the pass that trains; QK-clip needs their largest logits whatever that costs."""
    return attention.implementation == "triton" or attention.qk_clip is not None
