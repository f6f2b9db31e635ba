"""The training loss, as (sum of nats, number of tokens): divided once, by whoever knows the global count.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from andrea.attention import HeadStatistics
from andrea.model.gpt import GPT

IGNORED = -100  # a target that is not to be predicted: the padding of the last window


def loss_sum(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    observed: list[HeadStatistics] | None = None,
    recompute: bool = False,
) -> Tensor:
    """Sum over all targets of -ln p(target), in nats, fp32 scalar; tokens and targets (B, T) int64.

    observed: a list to which each layer appends the statistics of its heads. recompute: activation checkpointing.
    """
    logits = model.logits(model(tokens, observed=observed, recompute=recompute))  # (B, T, V)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def evaluate(
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    bytes_of_token: Tensor,
    device: torch.device,
    most_tokens: int | None = None,
) -> dict[str, float]:
    """Score every target of `batches` once: {"loss": nats per token, "bpb": bits per byte, "nats", "tokens", "bytes"}.

    bytes_of_token (V,) int64 counts a token's UTF-8 bytes, 0 for end-of-text, which therefore costs nats and adds no
    bytes. `most_tokens` stops early, at a batch's end.
    """
    nats, tokens_scored, bytes_scored = 0.0, 0, 0
    for tokens, targets in batches:
        scored = targets[targets != IGNORED]
        nats += float(loss_sum(tokens.to(device), targets.to(device)).detach())
        tokens_scored += scored.numel()
        bytes_scored += int(bytes_of_token[scored].sum())
        if most_tokens is not None and tokens_scored >= most_tokens:
            break
    return summary(nats, tokens_scored, bytes_scored)


def summary(nats: float, tokens: int, bytes_: int) -> dict[str, float]:
    """Loss in nats per token and in bits per byte; the second compares across tokenizers."""
    return {
        "loss": nats / max(tokens, 1),
        "bpb": nats / math.log(2) / max(bytes_, 1),
        "nats": nats,
        "tokens": tokens,
        "bytes": bytes_,
    }
