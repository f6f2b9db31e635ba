"""Cross-entropy as a sum in nats: the caller divides once, by the number of targets over all micro-batches and ranks.

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
from andrea.runtime.device import weight_dtype
from andrea.text.loader import IGNORED_TARGET
from andrea.training.loss.fused import fused_cross_entropy


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
    return loss_sum_from_hidden(model, model(tokens, observed=observed, recompute=recompute), targets)


def loss_sum_from_hidden(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """The readable loss: sum over all targets (B, T) of -ln p(target), in nats, from hidden (B, T, d_model)."""
    logits = model.logits(hidden)  # (B, T, V)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def training_loss_sum(model: GPT, hidden: Tensor, targets: Tensor, precision: str) -> Tensor:
    """`loss_sum_from_hidden` as training computes it: without holding all logits, except in fp16.

    The small gradients of fp16 need the loss scale, which multiplies the loss after the fused path has computed its
    gradients.
    """
    if precision == "fp16":
        return loss_sum_from_hidden(model, hidden, targets)
    return fused_cross_entropy(hidden, model.head_weight, targets, model.config.logit_softcap, weight_dtype(precision))


def evaluate(
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    bytes_of_token: Tensor,
    device: torch.device,
) -> dict[str, float]:
    """Score every target of `batches` once: {"loss": nats per token, "bpb": bits per byte, "nats", "tokens", "bytes"}.

    loss_sum: tokens, targets (B, T) -> nats. bytes_of_token (V,) int64: the UTF-8 bytes of each token, 0 for end-of-text,
    which therefore costs nats and adds no bytes.
    """
    nats, tokens_scored, bytes_scored = [], 0, 0
    for tokens, targets in batches:
        scored = targets[targets != IGNORED_TARGET]
        nats.append(
            loss_sum(tokens.to(device), targets.to(device)).detach()
        )  # read at the end, to keep the device busy
        tokens_scored += scored.numel()
        bytes_scored += int(bytes_of_token[scored].sum())
    return summary(sum(map(float, nats)), tokens_scored, bytes_scored)


def summary(nats: float, tokens: int, bytes_: int) -> dict[str, float]:
    """Loss in nats per token and in bits per byte; only the second is comparable across tokenizers."""
    return {
        "loss": nats / max(tokens, 1),
        "bpb": nats / math.log(2) / max(bytes_, 1),
        "nats": nats,
        "tokens": tokens,
        "bytes": bytes_,
    }
