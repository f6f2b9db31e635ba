"""What attention does while it learns: figures of each layer and head, and what of them is logged.

L layers, H heads. Definitions are in andrea/attention/statistics.py. `attention/…` is of a fixed held-out batch, in fp32:
the same for every run on the same data, whatever computes it. `attention/step/…` is of the training step itself, where
that measures its heads.
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

PROBE_TOKENS = 2048  # at most, in the fixed held-out batch that is looked at; at least one sequence of each source


def probe_batch(corpus: Corpus, sequence_length: int) -> Tensor:
    """The first held-out sequences of every source, (B, T) int64: the same in every run on these data."""
    each = max(1, PROBE_TOKENS // sequence_length // len(corpus.sources))
    return torch.cat([next(validation_batches(source.val, sequence_length, each))[0] for source in corpus.sources])


@torch.no_grad()
def probe(model: GPT, tokens: Tensor) -> HeadStatistics:
    """The heads' statistics (L, H) over tokens (B, T), in the weights' own precision: fp32 while training.

    One sequence at a time: where no kernel measures, its scores are written out.
    """
    heads = None
    for sequence in tokens.split(1):
        observed: list[HeadStatistics] = []
        model(sequence, observed=observed)
        measured = HeadStatistics.of_layers(observed)
        heads = measured if heads is None else heads.merged(measured)
    return heads


def scalars(heads: HeadStatistics, group: str = "attention") -> dict[str, float | None]:
    """Over all layers and heads: means, and the extreme where one head alone is what matters; as `group/…`."""
    figures = heads.figures()
    mean = {name: value.nanmean() for name, value in figures.items() if name != "largest_logit"}
    extremes = {
        "largest_logit": figures["largest_logit"].amax(),
        "lowest_entropy_share": lowest(figures["entropy_share"]),
        "highest_first_token_mass": -lowest(-figures["first_token_mass"]),
        "highest_previous_token_mass": -lowest(-figures["previous_token_mass"]),
    }
    return {f"{group}/{name}": plain(float(value)) for name, value in (mean | extremes).items()}


def heatmaps(heads: HeadStatistics) -> dict[str, list[list[float | None]]]:
    """Each figure as L rows of H numbers."""
    return {
        f"attention/heads/{name}": [[plain(number) for number in row] for row in value.tolist()]
        for name, value in heads.figures().items()
    }


def lowest(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=math.inf).amin()


def plain(number: float) -> float | None:
    """A figure that no query counted for is null in a record."""
    return number if math.isfinite(number) else None


def measures_every_step(attention: AttentionConfig) -> bool:
    """Our kernel measures the heads in the pass that trains; QK-clip needs their largest logits whatever that costs."""
    return attention.implementation == "triton" or attention.qk_clip is not None
